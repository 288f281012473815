// One decode step of a model as one kernel: see persistent_step.py.
//
// A block runs on each multiprocessor for the whole step. Its producer warp copies the block's share of
// every weight through a ring of shared memory, in order, and never waits for activations. Its eight
// consumer warps compute. What a phase gives goes to all blocks through global memory: a value that is
// not there yet reads as all ones (a NaN that no arithmetic gives), so a value is its own flag.
#include "hopper.cuh"

constexpr int WARPS = 8, CONSUMERS = WARPS * 32;
__host__ __device__ constexpr int vectors(int k) { return (k / 8 + CONSUMERS - 1) / CONSUMERS; }  // of 16 bytes: a thread has every 256th
constexpr int HEADS_PER_KV = NQ / NKV, QKV = (NQ + 2 * NKV) * D;
constexpr int PART = D + 4;                 // floats of a partial attention: sums, maximum, sum
constexpr int WIDEST = H > I ? (H > NQ * D ? H : NQ * D) : (I > NQ * D ? I : NQ * D);
constexpr u32 EMPTY = 0xffffffffu;
constexpr i64 PATIENCE = 2000000000;        // cycles

#if IS_PACKED
struct Weight {
  const unsigned char *codes, *scales;
  const float *absmax, *offset;  // of nested scales
};
#else
using Weight = const u16*;
#endif

struct Layer {
  Weight q, k, v, o, gate, up, down;
  const u16 *norm1, *post1, *norm2, *post2, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias;
  u16 *keys, *values;
  i64 head_stride;
  const u16* table;
  const i64 *slot, *span;
};

struct Args {
  const Layer* layers;
  const u16 *embedding, *norm, *head;
  const i64 *token, *position;
  unsigned char* words;
  u32* step;
  int* error;
  u16* logits;
  float* maxima;
  int* tokens;
  i64* profile;
#if IS_PACKED
  const float *table, *nested;
#endif
};

// Bytes of what one layer publishes.
constexpr u32 AT_QKV = 0, AT_PARTS = AT_QKV + QKV * 2, AT_A = AT_PARTS + NQ * SPLITS * PART * 4,
              AT_O = AT_A + NQ * D * 2, AT_M = AT_O + H * 2, AT_DOWN = AT_M + I * 2,
              LAYER_BYTES = (AT_DOWN + H * 2 + 127) / 128 * 128;
constexpr u64 WORDS = (u64)LAYER_BYTES * L;
#ifdef EXCHANGED_BYTES
static_assert(2 * WORDS == EXCHANGED_BYTES, "the host has made another buffer");
#endif

__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float rounded(float a) { return low(pack(a, 0.f)); }
__device__ __forceinline__ float half_of(u16 x) { return __uint_as_float((u32)x << 16); }
// C values are published at once, so one of them stands for all.
__device__ __forceinline__ bool is_low(u32 x) { return (x & 0xffff) != 0xffff; }
__device__ __forceinline__ bool is_high(u32 x) { return x < 0xffff0000u; }
template <int C>
__device__ __forceinline__ bool is_there(uint4 x) {
  bool there = is_low(x.x) & is_low(x.z);
  if (C < 4) there &= is_low(x.y) & is_low(x.w);
  if (C < 2) there &= is_high(x.x) & is_high(x.y) & is_high(x.z) & is_high(x.w);
  return there;
}
__device__ __forceinline__ float warp_sum(float a) {
#pragma unroll
  for (int o = 16; o; o >>= 1) a += __shfl_xor_sync(~0u, a, o);
  return a;
}
__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 0
  return x / (1.f + __expf(-x));
#else
  float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x * (1.f - 1.f / (1.f + __expf(2.f * inner)));
#endif
}
// A normalized value times its weight, as the model rounds it (heads only).
__device__ __forceinline__ float weighted(float x, u16 w) {
#if NORM_OFFSET
  return rounded(x * (1.f + half_of(w)));
#else
  return rounded(rounded(x) * half_of(w));
#endif
}
__device__ __forceinline__ float norm_weight(float w) { return NORM_OFFSET ? 1.f + w : w; }

// Whether a wait has lasted too long, here or in another block: then all of them end.
__device__ __noinline__ bool is_late(int* error, i64 begun) {
  if (*(volatile int*)error == 0 && clock64() - begun <= PATIENCE) return false;
  *(volatile int*)error = 1;
  return true;
}

struct Block {
  const Args& args;
  const int c, warp, lane, thread;
  const i64 begun;
  float *sums, *other_sums, *squares, *scratch;
  u64 *full, *empty;
  volatile int* flight;  // stages that may be under way
  bool failed = false;

  __device__ bool waits(u32& spins) {  // false: give up
    if ((++spins & 1023) == 0) failed = failed || is_late(args.error, begun);
    return !failed;
  }
  __device__ void wait(u64* barrier, u32 parity) {
    u32 spins = 0;
    while (!has_ended(barrier, parity) && waits(spins)) {}
  }
  __device__ void all_consumers() {
    __syncwarp();
    barrier<CONSUMERS>(1);
  }
  // A warp that has no inputs to wait for begins with the next sums while others read these.
  __device__ void swap_sums() {
    float* s = sums;
    sums = other_sums, other_sums = s;
  }
};

#include "persistent_cuts.cuh"
#if IS_TILED
#include "persistent_tiles.cuh"
#elif IS_PACKED
#include "persistent_packed.cuh"
#endif

__device__ void produce(Block& b) {
  const Args& args = b.args;
  u32 issued = 0, arrived = 0;
  int turn = 0;
  const u64 policy = read_once();
  auto next = [&](u32 bytes) -> int {
    int slot = issued % SLOTS;
    if (issued >= SLOTS) b.wait(b.empty + slot, (issued / SLOTS - 1) & 1);
    while (arrived < issued && issued - arrived >= (u32)*b.flight) {
      b.wait(b.full + arrived % SLOTS, (arrived / SLOTS) & 1);
      arrived++;
    }
    if (b.failed) return -1;
    arrive_and_expect(b.full + slot, bytes);
    issued++;
    return slot;
  };
  auto rows = [&](auto cut, auto&& source) {  // source(chunk, row): its weights
    using P = decltype(cut);
    Share<P::N> share(b.c, turn);
    constexpr int run = P::RS < P::C ? P::RS : P::C;  // rows that lie together
    for (int row = 0; row < share.count * P::VR; row += P::RS) {
      const int rows = min(P::RS, share.count * P::VR - row);
      const int slot = next(rows * P::K * 2);
      if (slot < 0) return;
#pragma unroll
      for (int r = 0; r < P::RS; r += run)
        if (r < rows) copy(shared_memory + RING_AT + slot * STAGE + r * P::K * 2, source(share.first + (row + r) / P::VR * BLOCKS, (row + r) % P::VR), run * P::K * 2, b.full + slot, policy);
    }
  };
  for (int l = 0; l < L; l++) {
    const Layer y = args.layers[l];
#if IS_PACKED
    produce_rows<CutQKV>(b, y, turn, policy, next);
    produce_rows<CutO>(b, y, turn, policy, next);
    produce_rows<CutGate>(b, y, turn, policy, next);
    produce_rows<CutDown>(b, y, turn, policy, next);
#else
    auto rows_of = [&](auto cut) {
      using P = decltype(cut);
      rows(cut, [&](int chunk, int r) {
        const Row own = P::row_of(y, chunk, r);
        return own.weight + (u64)own.row * P::K;
      });
    };
    rows_of(CutQKV{});
    rows_of(CutO{});
    rows_of(CutGate{});
    rows_of(CutDown{});
#endif
  }
  rows(CutHead{}, [&](int i, int v) { return args.head + (u64)(i * C_HEAD + v) * H; });
  // No copy may be under way when the block ends.
  for (u32 s = issued > SLOTS ? issued - SLOTS : 0; s < issued; s++)
    while (!has_ended(b.full + s % SLOTS, (s / SLOTS) & 1)) {}
}

// The inputs of a phase: those of this thread.
template <int K, int C>
__device__ void load_words(Block& b, const unsigned char* words, uint4 (&x)[vectors(K)]) {
  constexpr int N = vectors(K);
  u32 spins = 0;
  bool complete[N];
#pragma unroll
  for (int v = 0; v < N; v++) {
    complete[v] = !(v * CONSUMERS + b.thread < K / 8);
    x[v] = make_uint4(0, 0, 0, 0);
  }
  bool all;
  do {
    all = true;
#pragma unroll
    for (int v = 0; v < N; v++)
      if (!complete[v]) x[v] = look16(words + (v * CONSUMERS + b.thread) * 16);
#pragma unroll
    for (int v = 0; v < N; v++) {
      complete[v] = complete[v] || is_there<C>(x[v]);
      all &= complete[v];
    }
  } while (!__all_sync(~0u, all) && __any_sync(~0u, b.waits(spins)));
}

// The sums of four values over a warp: of value i in lane 8 i.
__device__ __forceinline__ float warp_sums(const Block& b, float v0, float v1, float v2, float v3) {
  const bool upper = b.lane & 16, odd = b.lane & 8;
  float p = (upper ? v2 : v0) + __shfl_xor_sync(~0u, upper ? v0 : v2, 16);
  float q = (upper ? v3 : v1) + __shfl_xor_sync(~0u, upper ? v1 : v3, 16);
  p = (odd ? q : p) + __shfl_xor_sync(~0u, odd ? p : q, 8);
#pragma unroll
  for (int o = 4; o; o >>= 1) p += __shfl_xor_sync(~0u, p, o);
  return p;
}

// The products of a stage's rows with x: this thread's part.
template <class P>
__device__ __forceinline__ void multiply(Block& b, const float* x, u32 t, float* sums) {
  constexpr int K8 = P::K / 8, LANES = P::RS >= 4 ? 1 : 4 / P::RS;
  const int slot = t % SLOTS;
  b.wait(b.full + slot, (t / SLOTS) & 1);
  const uint4* w = (const uint4*)(shared_memory + RING_AT + slot * STAGE);
  float a[P::RS][LANES];
#pragma unroll
  for (int r = 0; r < P::RS; r++)
#pragma unroll
    for (int i = 0; i < LANES; i++) a[r][i] = 0;
#pragma unroll
  for (int v = 0; v < P::VECTORS; v++) {
    const int at = v * CONSUMERS + b.thread;
    if (K8 % CONSUMERS == 0 || at < K8) {
#pragma unroll
      for (int r = 0; r < P::RS; r++) {
        const uint4 y = w[r * K8 + at];
        float* z = a[r];
        z[0] = fmaf(low(y.x), x[8 * v], z[0]);
        z[1 % LANES] = fmaf(high(y.x), x[8 * v + 1], z[1 % LANES]);
        z[2 % LANES] = fmaf(low(y.y), x[8 * v + 2], z[2 % LANES]);
        z[3 % LANES] = fmaf(high(y.y), x[8 * v + 3], z[3 % LANES]);
        z[0] = fmaf(low(y.z), x[8 * v + 4], z[0]);
        z[1 % LANES] = fmaf(high(y.z), x[8 * v + 5], z[1 % LANES]);
        z[2 % LANES] = fmaf(low(y.w), x[8 * v + 6], z[2 % LANES]);
        z[3 % LANES] = fmaf(high(y.w), x[8 * v + 7], z[3 % LANES]);
      }
    }
  }
  __syncwarp();
  if (!b.lane) arrive(b.empty + slot);
#pragma unroll
  for (int r = 0; r < P::RS; r++) {
    sums[r] = a[r][0];
#pragma unroll
    for (int i = 1; i < LANES; i++) sums[r] += a[r][i];
  }
}

// Four rows are added over a warp at once.
template <class P>
__device__ void stream(Block& b, const float* x, int count, u32& stage) {
  constexpr int ROWS = P::RS * P::AT_ONCE, PADDED = (ROWS + 3) / 4 * 4;
  const int stages = P::stages(count);
  for (int s = 0; s < stages; s += P::AT_ONCE) {
    float sums[PADDED];
#pragma unroll
    for (int i = 0; i < PADDED; i++) sums[i] = 0;
#pragma unroll
    for (int i = 0; i < P::AT_ONCE; i++)
      if (s + i < stages) multiply<P>(b, x, stage + s + i, sums + i * P::RS);
#pragma unroll
    for (int i = 0; i < PADDED; i += 4) {
      const float z = warp_sums(b, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
      const int n = i + b.lane / 8;
      if (b.lane % 8 == 0 && n < ROWS) b.sums[(s * P::RS + n) * WARPS + b.warp] = z;
    }
  }
  stage += stages;
}

__device__ __forceinline__ float total(const Block& b, int row) {
  const float4* p = (const float4*)(b.sums + row * WARPS);
  return ((p[0].x + p[0].y) + (p[0].z + p[0].w)) + ((p[1].x + p[1].y) + (p[1].z + p[1].w));
}

template <int C>
__device__ __forceinline__ void publish(unsigned char* words, int row, const float* y) {
  if (C == 4) tell8(words + row * 2, pack(y[0], y[1]), pack(y[2 % C], y[3 % C]));
  if (C == 2) tell4(words + row * 2, pack(y[0], y[1 % C]));
  if (C == 1) tell2(words + row * 2, pack(y[0], 0.f));
}

#if !IS_PACKED
// The sums of this block's rows: `publish_sums` takes a chunk of them, which begins with this row. While
// many weights are multiplied, more copies may be under way.
template <class P, bool IS_LONG, class Publish>
__device__ __forceinline__ void linear(Block& b, const Layer& y, const float* x, int& turn, u32& stage, Publish&& publish_sums) {
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_STREAM;
  Share<P::N> share(b.c, turn);
  stream<P>(b, x, share.count, stage);
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_WAIT;
  b.all_consumers();
  if (b.thread < share.count) {
    float z[P::VR];
#pragma unroll
    for (int r = 0; r < P::VR; r++) z[r] = total(b, b.thread * P::VR + r);
    publish_sums((share.first + b.thread * BLOCKS) * P::C, z);
  }
  b.swap_sums();
  __syncwarp();
}
#endif

__device__ __forceinline__ float sum_of_squares(const float* of_warps) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += of_warps[w];
  return sum;
}
// 1 / sqrt(mean(x^2) + eps) of what `squared` was given
__device__ __forceinline__ float scale_of(const Block& b) {
  return rsqrtf(sum_of_squares(b.squares) / H + EPS);
}
__device__ __forceinline__ void note_squares(Block& b, float a) {
  a = warp_sum(a);
  if (!b.lane) b.squares[b.warp] = a;
}

// The weights of a norm: asked for before the values that they are multiplied with are there.
__device__ __forceinline__ void fetch(const Block& b, const u16* weight, uint4 (&w)[H_VECTORS]) {
#pragma unroll
  for (int v = 0; v < H_VECTORS; v++) {
    const int at = v * CONSUMERS + b.thread;
    w[v] = at < H / 8 ? *(const uint4*)(weight + at * 8) : make_uint4(0, 0, 0, 0);
  }
}

struct Hidden {  // the residual stream: the vectors of this thread
  u32 h[H_VECTORS][4];

  __device__ void embed(Block& b) {
    const u16* row = b.args.embedding + (u64)b.args.token[0] * H;
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const int at = v * CONSUMERS + b.thread;
      uint4 y = at < H / 8 ? *(const uint4*)(row + at * 8) : make_uint4(0, 0, 0, 0);
      h[v][0] = y.x, h[v][1] = y.y, h[v][2] = y.z, h[v][3] = y.w;
#if HAS_EMBED_SCALE
#pragma unroll
      for (int i = 0; i < 4; i++) h[v][i] = pack(low(h[v][i]) * EMBED_SCALE, high(h[v][i]) * EMBED_SCALE);
#endif
    }
  }
  template <int C>
  __device__ __forceinline__ void add(Block& b, const unsigned char* words, const u16* post) {
    uint4 y[H_VECTORS];
#if HAS_POST_NORMS
    uint4 w4[H_VECTORS];
    fetch(b, post, w4);
#endif
    load_words<H, C>(b, words, y);
    float factor = 1;
#if HAS_POST_NORMS
    float a = 0;
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const u32 z[4] = {y[v].x, y[v].y, y[v].z, y[v].w};
#pragma unroll
      for (int i = 0; i < 4; i++) a = fmaf(low(z[i]), low(z[i]), fmaf(high(z[i]), high(z[i]), a));
    }
    a = warp_sum(a);
    if (!b.lane) b.squares[WARPS + b.warp] = a;
    b.all_consumers();
    factor = rsqrtf(sum_of_squares(b.squares + WARPS) / H + EPS);
#endif
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const u32 z[4] = {y[v].x, y[v].y, y[v].z, y[v].w};
#if HAS_POST_NORMS
      const u32 w[4] = {w4[v].x, w4[v].y, w4[v].z, w4[v].w};
#endif
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float p = low(z[i]), q = high(z[i]);
#if HAS_POST_NORMS
        p = rounded(p * factor * norm_weight(low(w[i])));
        q = rounded(q * factor * norm_weight(high(w[i])));
#endif
        h[v][i] = pack(low(h[v][i]) + p, high(h[v][i]) + q);
      }
    }
  }
  __device__ void normed(Block& b, const uint4 (&weight)[H_VECTORS], float* x) {  // times its scale, which comes at the end
    float a = 0;
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const u32 w[4] = {weight[v].x, weight[v].y, weight[v].z, weight[v].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float p = low(h[v][i]), q = high(h[v][i]);
        a = fmaf(p, p, fmaf(q, q, a));
        x[8 * v + 2 * i] = p * norm_weight(low(w[i]));
        x[8 * v + 2 * i + 1] = q * norm_weight(high(w[i]));
      }
    }
    note_squares(b, a);
  }
};

template <int K, int C>
__device__ void plain_input(Block& b, const unsigned char* words, float* x) {
  constexpr int N = vectors(K);
  uint4 y[N];
  load_words<K, C>(b, words, y);
#pragma unroll
  for (int v = 0; v < N; v++) {
    const u32 z[4] = {y[v].x, y[v].y, y[v].z, y[v].w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[8 * v + 2 * i] = low(z[i]), x[8 * v + 2 * i + 1] = high(z[i]);
  }
}

#include "persistent_attention.cuh"

__device__ void consume(Block& b) {
  const Args& args = b.args;
  const u32 step = *args.step;
  unsigned char* words = args.words + (step & 1) * WORDS;
  {
    uint4* others = (uint4*)(args.words + (~step & 1) * WORDS);  // for the next step
    for (u64 i = b.c * CONSUMERS + b.thread; i < WORDS / 16; i += (u64)BLOCKS * CONSUMERS) others[i] = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  }
  u32 stage = 0;
  int turn = 0;
  Hidden hidden;
  float x[vectors(WIDEST) * 8];
#if PROFILE
#define MARK(n) if (b.thread == 0) args.profile[((i64)b.c * (L + 1) + l) * 16 + n] = clock64();
#else
#define MARK(n)
#endif
  hidden.embed(b);
  uint4 weight[H_VECTORS];
  for (int l = 0; l < L; l++) {
    const Layer y = args.layers[l];
    unsigned char* own = words + (u64)l * LAYER_BYTES;
    MARK(0)
#if IS_PACKED
    fetch_offsets(b, args.layers + l);
#endif
    fetch(b, y.norm1, weight);
    if (l) hidden.add<C_DOWN>(b, own - LAYER_BYTES + AT_DOWN, args.layers[l - 1].post2);
    MARK(1)
    hidden.normed(b, weight, x);
    linear<CutQKV, false>(b, y, x, turn, stage, [&](int row, float* z) {
      const float scale = scale_of(b);
#pragma unroll
      for (int r = 0; r < C_QKV; r++) z[r] *= scale;
#if HAS_QKV_BIAS
#pragma unroll
      for (int r = 0; r < C_QKV; r++) {
        const int n = row + r;
        z[r] += half_of(n < NQ * D ? y.q_bias[n] : n < (NQ + NKV) * D ? y.k_bias[n - NQ * D] : y.v_bias[n - (NQ + NKV) * D]);
      }
#endif
      publish<C_QKV>(own + AT_QKV, row, z);
    });
    MARK(2)
    attend(b, y, own);
    MARK(3)
    combine(b, y, own);
    MARK(4)
    plain_input<NQ * D, 2>(b, own + AT_A, x);
    MARK(5)
    linear<CutO, false>(b, y, x, turn, stage, [&](int row, float* z) { publish<C_O>(own + AT_O, row, z); });
    MARK(6)
    fetch(b, y.norm2, weight);
    hidden.add<C_O>(b, own + AT_O, y.post1);
    MARK(7)
    hidden.normed(b, weight, x);
    linear<CutGate, true>(b, y, x, turn, stage, [&](int row, float* z) {
      const float scale = scale_of(b);
#pragma unroll
      for (int r = 0; r < C_GATE; r++) {
        const float gate = rounded(z[r] * scale), up = rounded(z[C_GATE + r] * scale);
        z[r] = rounded(activate(gate)) * up;
      }
      publish<C_GATE>(own + AT_M, row, z);
    });
    MARK(8)
    plain_input<I, C_GATE>(b, own + AT_M, x);
    MARK(9)
    linear<CutDown, true>(b, y, x, turn, stage, [&](int row, float* z) { publish<C_DOWN>(own + AT_DOWN, row, z); });
    MARK(10)
  }
  const int l = L;
  MARK(0)
  fetch(b, args.norm, weight);
  hidden.add<C_DOWN>(b, words + (u64)(L - 1) * LAYER_BYTES + AT_DOWN, args.layers[L - 1].post2);
  hidden.normed(b, weight, x);
  if (!b.thread) *b.flight = FLIGHT_STREAM;
  MARK(1)
  Share<CutHead::N> share(b.c, turn);
  float best = -INFINITY_;
  int token = V - 1;
  float scale = 0;
  for (int done = 0; done < share.count; done += HEAD_BLOCK) {
    const int count = min(HEAD_BLOCK, share.count - done);
    stream<CutHead>(b, x, count, stage);
    b.all_consumers();
    if (!done) scale = scale_of(b);
    if (b.thread < count) {
      const int row = (share.first + (done + b.thread) * BLOCKS) * C_HEAD;
      float z[C_HEAD];
#pragma unroll
      for (int r = 0; r < C_HEAD; r++) {
        z[r] = rounded(total(b, b.thread * C_HEAD + r) * scale);
        if (z[r] > best) best = z[r], token = row + r;
      }
      publish<C_HEAD>((unsigned char*)args.logits, row, z);
    }
    b.all_consumers();
  }
  // The largest logit of this block, the first of equals.
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const float other = __shfl_xor_sync(~0u, best, o);
    const int its = __shfl_xor_sync(~0u, token, o);
    if (other > best || (other == best && its < token)) best = other, token = its;
  }
  if (!b.lane) b.sums[b.warp] = best, ((int*)b.sums)[8 + b.warp] = token;
  b.all_consumers();
  if (b.thread == 0) {
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
      const float other = b.sums[w];
      const int its = ((int*)b.sums)[8 + w];
      if (other > best || (other == best && its < token)) best = other, token = its;
    }
    args.maxima[b.c] = best;
    args.tokens[b.c] = token;
    if (b.c == 0) *args.step = step + 1;
  }
  MARK(2)
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) persistent_step(const __grid_constant__ Args args) {
  unsigned char* after = shared_memory + RING_AT + STAGE * SLOTS;
  float* sums = (float*)after;                     // [2, SUM_ROWS, WARPS]
  float* squares = sums + 2 * SUM_ROWS * WARPS;  // [16]
  float* scratch = squares + 16;
  u64* full = (u64*)(scratch + SCRATCH);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    *(volatile int*)(full + 2 * SLOTS) = FLIGHT_STREAM;
    for (int i = 0; i < SLOTS; i++) {
      begin(full + i, 1);
      begin(full + SLOTS + i, WARPS);
    }
    all_begun();
  }
#if IS_PACKED
  write_tables(args);
#endif
  __syncthreads();
  Block block{args, (int)blockIdx.x, warp, (int)threadIdx.x % 32, (int)threadIdx.x, clock64(), sums, sums + SUM_ROWS * WARPS, squares, scratch, full, full + SLOTS, (volatile int*)(full + 2 * SLOTS)};
  if (warp == WARPS) {
    if (block.lane == 0) produce(block);
  } else {
    consume(block);
  }
}
