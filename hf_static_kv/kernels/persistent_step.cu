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

static_assert(sizeof(Layer) <= 384, "the host has left less room");

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
  Layer* table;          // of this layer and the next one, in turn
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
  // A word of a layer for each thread, read long before it is written to the table.
  __device__ u64 word_of_layer(int l) const { return l < L && thread < sizeof(Layer) / 8 ? ((const u64*)(args.layers + l))[thread] : 0; }
  __device__ void write_layer(int l, u64 word) {
    if (l < L && thread < sizeof(Layer) / 8) ((u64*)(table + l % 2))[thread] = word;
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
__device__ void load_words(Block& b, const unsigned char* words, uint4* x) {
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

// Rows of a stage with x, on tensor cores: of an mma, with lane (g, t) = (lane / 4, lane % 4) and number q of four,
//
//     rows g and g + 8   are of one or two weight rows the vectors of lanes (g ^ 2 q, 0 to 3)
//     column n           has the inputs of lanes (n, 0 to 3)
//
// So sum [g, n] with n = g ^ 2 q is of the first weight row, and [g + 8, n] of the second: of every four mma a lane
// has the sums of one. A batch of stages is added up over the warp at once, which takes as long as one.
constexpr int STAGES_AT_ONCE = 8, MOST_ROWS_AT_ONCE = 32;

template <class P>
struct Batch {
  static constexpr int OF_MMA = P::RS > 1 ? 2 : 1, MOST = STAGES_AT_ONCE * P::RS < MOST_ROWS_AT_ONCE ? STAGES_AT_ONCE * P::RS : MOST_ROWS_AT_ONCE;
  static constexpr int OF_BLOCK = (P::N + BLOCKS - 1) / BLOCKS * P::VR;  // rows, at most
  static constexpr int ROWS = OF_BLOCK < MOST ? (OF_BLOCK + P::RS - 1) / P::RS * P::RS : MOST, STAGES = ROWS / P::RS;
  static constexpr int FOURS = (ROWS / OF_MMA + 3) / 4;
  static_assert(P::RS % OF_MMA == 0, "a stage has whole mma");
};

template <class P>
__device__ __forceinline__ void multiply_batch(Block& b, const uint4* x, int row, int rows, u32 stage) {
  using Q = Batch<P>;
  constexpr int K8 = P::K / 8;
  float sums[Q::FOURS][4][4] = {};
  int slot = stage % SLOTS;
  u32 parity = stage / SLOTS & 1;
#pragma unroll
  for (int s = 0; s < Q::STAGES; s++) {
    if (s * P::RS >= rows) continue;
    b.wait(b.full + slot, parity);
    const uint4* w = (const uint4*)(shared_memory + RING_AT + slot * STAGE);
#pragma unroll
    for (int v = 0; v < P::VECTORS; v++) {
      if (K8 % CONSUMERS && v * CONSUMERS + b.warp * 32 >= K8) continue;  // this warp has no inputs
#pragma unroll
      for (int r = 0; r < P::RS; r += Q::OF_MMA) {
        const int n = (s * P::RS + r) / Q::OF_MMA, at = v * CONSUMERS + (b.thread ^ 8 * (n % 4));
        uint4 y = make_uint4(0, 0, 0, 0), z = y;
        if (K8 % CONSUMERS == 0 || at < K8) {
          y = w[r * K8 + at];
          if (Q::OF_MMA == 2) z = w[(r + 1) * K8 + at];
        }
        multiply(sums[n / 4][n % 4], y.x, z.x, y.y, z.y, x[v].x, x[v].y);
        multiply(sums[n / 4][n % 4], y.z, z.z, y.w, z.w, x[v].z, x[v].w);
      }
    }
    __syncwarp();
    if (!b.lane) arrive(b.empty + slot);
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
  const int own = b.lane % 4 ^ b.lane / 8;  // of every four
  float both[Q::FOURS][2];
#pragma unroll
  for (int i = 0; i < Q::FOURS; i++)
#pragma unroll
    for (int q = 0; q < 4; q++)
      if (q == own) both[i][0] = b.lane & 4 ? sums[i][q][1] : sums[i][q][0], both[i][1] = b.lane & 4 ? sums[i][q][3] : sums[i][q][2];
#pragma unroll
  for (int o : {4, 8 | 1, 16 | 2})
#pragma unroll
    for (int i = 0; i < Q::FOURS; i++)
#pragma unroll
      for (int k = 0; k < Q::OF_MMA; k++) both[i][k] += __shfl_xor_sync(~0u, both[i][k], o);
  if (b.lane < 4) {
#pragma unroll
    for (int i = 0; i < Q::FOURS; i++)
#pragma unroll
      for (int k = 0; k < Q::OF_MMA; k++) b.sums[(row + (4 * i + b.lane) * Q::OF_MMA + k) * WARPS + b.warp] = both[i][k];
  }
}

template <class P>
__device__ void stream(Block& b, const uint4* x, int count, u32& stage) {
  const int rows = count * P::VR;
  for (int row = 0; row < rows; row += Batch<P>::ROWS) {
    multiply_batch<P>(b, x, row, rows - row, stage);
    stage += (min(Batch<P>::ROWS, rows - row) + P::RS - 1) / P::RS;
  }
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
__device__ __forceinline__ void linear(Block& b, const Layer& y, const uint4* x, int& turn, u32& stage, Publish&& publish_sums) {
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
  __device__ void normed(Block& b, const uint4 (&weight)[H_VECTORS], uint4* x) {  // times its scale, which comes at the end
    float a = 0;
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const u32 w[4] = {weight[v].x, weight[v].y, weight[v].z, weight[v].w};
      u32 z[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float p = low(h[v][i]), q = high(h[v][i]);
        a = fmaf(p, p, fmaf(q, q, a));
        z[i] = pack(p * norm_weight(low(w[i])), q * norm_weight(high(w[i])));
      }
      x[v] = make_uint4(z[0], z[1], z[2], z[3]);
    }
    note_squares(b, a);
  }
};

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
  uint4 x[vectors(WIDEST)];
#if PROFILE
#define MARK(n) if (b.thread == 0) args.profile[((i64)b.c * (L + 1) + l) * 16 + n] = clock64();
#else
#define MARK(n)
#endif
  hidden.embed(b);
  b.write_layer(0, b.word_of_layer(0));
  b.all_consumers();
  const i64 position = args.position[0];
  uint4 weight[H_VECTORS];
  for (int l = 0; l < L; l++) {
    const Layer& y = b.table[l % 2];
    const Place place(y);
    const u64 word = b.word_of_layer(l + 1);
    unsigned char* own = words + (u64)l * LAYER_BYTES;
    MARK(0)
#if IS_PACKED
    fetch_offsets(b, args.layers + l);
#endif
    fetch(b, y.norm1, weight);
    if (l) hidden.add<C_DOWN>(b, own - LAYER_BYTES + AT_DOWN, b.table[(l - 1) % 2].post2);
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
    b.write_layer(l + 1, word);  // nothing reads the layer before any more
    const Splits splits(place);
    attend(b, y, own, place, splits, position);
    MARK(3)
    combine(b, own, splits);
    MARK(4)
    load_words<NQ * D, 2>(b, own + AT_A, x);
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
    load_words<I, C_GATE>(b, own + AT_M, x);
    MARK(9)
    linear<CutDown, true>(b, y, x, turn, stage, [&](int row, float* z) { publish<C_DOWN>(own + AT_DOWN, row, z); });
    MARK(10)
  }
  const int l = L;
  MARK(0)
  fetch(b, args.norm, weight);
  hidden.add<C_DOWN>(b, words + (u64)(L - 1) * LAYER_BYTES + AT_DOWN, b.table[(L - 1) % 2].post2);
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
        if (z[r] > best || (z[r] == best && row + r < token)) best = z[r], token = row + r;
      }
      publish<C_HEAD>((unsigned char*)args.logits, row, z);
    }
    b.all_consumers();
  }
  // The largest logit of this block, the first of equals; V - 1 if all are NaN.
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
  Block block{args, (int)blockIdx.x, warp, (int)threadIdx.x % 32, (int)threadIdx.x, clock64(), sums, sums + SUM_ROWS * WARPS, squares, scratch, full, full + SLOTS, (volatile int*)(full + 2 * SLOTS), (Layer*)(full + 2 * SLOTS + 1)};
  if (warp == WARPS) {
    if (block.lane == 0) produce(block);
  } else {
    consume(block);
  }
}
