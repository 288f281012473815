// One decode step of a model as one kernel: see persistent_step.py.
//
// A block runs on each multiprocessor for the whole step. Its producer warp copies the block's share of
// every weight through a ring of shared memory, in order, and never waits for activations. Its eight
// consumer warps compute. What a phase gives goes to all blocks through global memory: a value that is
// not there yet reads as all ones (a NaN that no arithmetic gives), so a value is its own flag.
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, GROUP = 128;
constexpr int HEADS_PER_KV = NQ / NKV, QKV = (NQ + 2 * NKV) * D;
constexpr int PART = D + 4;                 // floats of a partial attention: sums, maximum, sum
constexpr u32 EMPTY = 0xffffffffu;
constexpr i64 PATIENCE = 2000000000;        // cycles

struct Layer {
  const u16 *q, *k, *v, *o, *gate, *up, *down;
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
};

// Bytes of what one layer publishes.
constexpr u32 AT_QKV = 0, AT_PARTS = AT_QKV + QKV * 2, AT_A = AT_PARTS + NQ * SPLITS * PART * 4,
              AT_O = AT_A + NQ * D * 2, AT_M = AT_O + H * 2, AT_DOWN = AT_M + I * 2,
              LAYER_BYTES = (AT_DOWN + H * 2 + 127) / 128 * 128;
constexpr u64 WORDS = (u64)LAYER_BYTES * L;

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float rounded(float a) { return low(pack(a, 0.f)); }
__device__ __forceinline__ float half_of(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ uint4 look16(const void* p) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ u32 look4(const void* p) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void tell4(void* p, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(x) : "memory"); }
__device__ __forceinline__ void tell8(void* p, u32 x, u32 y) { asm volatile("st.relaxed.gpu.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(x), "r"(y) : "memory"); }
__device__ __forceinline__ void tell2(void* p, u32 x) { asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(p), "h"((u16)x) : "memory"); }
__device__ __forceinline__ bool is_there(u32 x) { return __vcmpeq2(x, EMPTY) == 0; }
__device__ __forceinline__ bool is_there(uint4 x) { return is_there(x.x) & is_there(x.y) & is_there(x.z) & is_there(x.w); }
__device__ __forceinline__ uint4 old16(const u16* p) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
  return x;
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

extern __shared__ __align__(1024) unsigned char ring[];

struct Block {
  const Args& args;
  const int c, blocks, warp, lane, thread, group, quarter, in_group;
  const i64 begun;
  float *sums, *squares, *scratch;
  u64 *full, *empty;
  bool failed = false;

  __device__ bool waits(u32& spins) {  // false: give up
    if (failed) return false;
    if ((++spins & 1023) == 0 && (*(volatile int*)args.error || clock64() - begun > PATIENCE)) {
      *(volatile int*)args.error = 1;
      failed = true;
      return false;
    }
    return true;
  }
  __device__ void wait(u64* barrier, u32 parity) {
    u32 done = 0, spins = 0;
    do
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(shared(barrier)), "r"(parity) : "memory");
    while (!done && waits(spins));
  }
  __device__ void all_consumers() {
    __syncwarp();
    asm volatile("barrier.sync 1, 256;" ::: "memory");
  }
  __device__ void all_of_group() {
    __syncwarp();
    asm volatile("barrier.sync %0, 128;" ::"r"(2 + group) : "memory");
  }
  __device__ u32 get(const void* p) {
    u32 x = look4(p), spins = 0;
    while (!is_there(x) && waits(spins)) x = look4(p);
    return x;
  }
  __device__ u32 get_float(const void* p) {
    u32 x = look4(p), spins = 0;
    while (x == EMPTY && waits(spins)) x = look4(p);
    return x;
  }
};

// How a phase is cut: `chunks` of C output rows go to the blocks in turn; a stage holds RS rows of K.
template <int K_, int C_, int RS_, int VR_>
struct Cut {
  static constexpr int K = K_, C = C_, RS = RS_, VR = VR_, STAGES = VR_ / RS_, VECTORS = (K_ / 8 + GROUP - 1) / GROUP;
};
using CutQKV = Cut<H, C_QKV, RS_QKV, C_QKV>;
using CutO = Cut<NQ * D, C_O, RS_O, C_O>;
using CutGate = Cut<H, C_GATE, RS_GATE, 2 * C_GATE>;
using CutDown = Cut<I, C_DOWN, RS_DOWN, C_DOWN>;
using CutHead = Cut<H, C_HEAD, RS_HEAD, C_HEAD>;
constexpr int N_QKV = QKV / C_QKV, N_O = H / C_O, N_GATE = I / C_GATE, N_DOWN = H / C_DOWN, N_HEAD = V / C_HEAD;
constexpr int HEAD_BLOCK = SUM_ROWS / C_HEAD;
constexpr int H_VECTORS = (H / 8 + GROUP - 1) / GROUP;

struct Share {  // of a phase: chunks first, first + blocks, ...
  int first, count;
  __device__ Share(int n, int c, int blocks, int& turn) {
    first = (c + blocks - turn) % blocks;
    count = first < n ? (n - first + blocks - 1) / blocks : 0;
    turn = (turn + n) % blocks;
  }
};

__device__ void produce(Block& b) {
  const Args& args = b.args;
  u32 issued = 0;
  int turn = 0;
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  auto copy = [&](const u16* from, int slot, u32 at, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared(ring + slot * STAGE + at)), "l"(from), "r"(bytes), "r"(shared(b.full + slot)), "l"(policy) : "memory");
  };
  auto next = [&](u32 bytes) -> int {
    int slot = issued % SLOTS;
    if (issued >= SLOTS) b.wait(b.empty + slot, (issued / SLOTS - 1) & 1);
    if (IN_FLIGHT < SLOTS && issued >= IN_FLIGHT) {
      u32 before = issued - IN_FLIGHT;
      b.wait(b.full + before % SLOTS, (before / SLOTS) & 1);
    }
    if (b.failed) return -1;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared(b.full + slot)), "r"(bytes) : "memory");
    issued++;
    return slot;
  };
  auto rows = [&](auto cut, int n, auto&& source) {  // source(virtual row): its weights
    using P = decltype(cut);
    Share share(n, b.c, b.blocks, turn);
    for (int j = 0; j < share.count; j++)
      for (int s = 0; s < P::STAGES; s++) {
        int slot = next(P::RS * P::K * 2);
        if (slot < 0) return;
        constexpr int run = P::RS < P::C ? P::RS : P::C;  // rows that lie together
#pragma unroll
        for (int r = 0; r < P::RS; r += run) copy(source(share.first + j * b.blocks, s * P::RS + r), slot, r * P::K * 2, run * P::K * 2);
      }
  };
  for (int l = 0; l < L; l++) {
    const Layer y = args.layers[l];
    rows(CutQKV{}, N_QKV, [&](int i, int v) {
      int r = i * C_QKV + v;
      return r < NQ * D ? y.q + (u64)r * H : r < (NQ + NKV) * D ? y.k + (u64)(r - NQ * D) * H : y.v + (u64)(r - (NQ + NKV) * D) * H;
    });
    rows(CutO{}, N_O, [&](int i, int v) { return y.o + (u64)(i * C_O + v) * (NQ * D); });
    rows(CutGate{}, N_GATE, [&](int i, int v) { return (v < C_GATE ? y.gate : y.up) + (u64)(i * C_GATE + v % C_GATE) * H; });
    rows(CutDown{}, N_DOWN, [&](int i, int v) { return y.down + (u64)(i * C_DOWN + v) * I; });
  }
  rows(CutHead{}, N_HEAD, [&](int i, int v) { return args.head + (u64)(i * C_HEAD + v) * H; });
  // No copy may be under way when the block ends.
  for (u32 s = issued > SLOTS ? issued - SLOTS : 0; s < issued; s++) {
    u32 done = 0;
    while (!done)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(shared(b.full + s % SLOTS)), "r"((s / SLOTS) & 1) : "memory");
  }
}

// The inputs of a phase, 16 bytes of every 128th vector for each thread of a group.
template <int K>
__device__ void load_words(Block& b, const unsigned char* words, uint4 (&x)[(K / 8 + GROUP - 1) / GROUP]) {
  constexpr int N = (K / 8 + GROUP - 1) / GROUP;
  u32 spins = 0;
  bool complete[N];
#pragma unroll
  for (int v = 0; v < N; v++) {
    complete[v] = !(v * GROUP + b.in_group < K / 8);
    x[v] = make_uint4(0, 0, 0, 0);
  }
  bool all;
  do {
    all = true;
#pragma unroll
    for (int v = 0; v < N; v++)
      if (!complete[v]) x[v] = look16(words + (v * GROUP + b.in_group) * 16);
#pragma unroll
    for (int v = 0; v < N; v++) {
      complete[v] = complete[v] || is_there(x[v]);
      all &= complete[v];
    }
  } while (!__all_sync(~0u, all) && __any_sync(~0u, b.waits(spins)));
}

template <class P>
__device__ void stream(Block& b, const float* x, int count, u32& stage) {
  constexpr int K8 = P::K / 8, LANES = P::RS >= 4 ? 1 : 4 / P::RS;
  for (int s = 0; s < count * P::STAGES; s++) {
    const u32 t = stage + s;
    if ((int)(t & 1) != b.group) continue;
    const int slot = t % SLOTS;
    b.wait(b.full + slot, (t / SLOTS) & 1);
    const uint4* w = (const uint4*)(ring + slot * STAGE);
    float a[P::RS][LANES];
#pragma unroll
    for (int r = 0; r < P::RS; r++)
#pragma unroll
      for (int i = 0; i < LANES; i++) a[r][i] = 0;
#pragma unroll
    for (int v = 0; v < P::VECTORS; v++) {
      const int at = v * GROUP + b.in_group;
      if (K8 % GROUP == 0 || at < K8) {
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
    if (!b.lane) asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared(b.empty + slot)) : "memory");
#pragma unroll
    for (int r = 0; r < P::RS; r++) {
      float z = a[r][0];
#pragma unroll
      for (int i = 1; i < LANES; i++) z += a[r][i];
      z = warp_sum(z);
      if (!b.lane) b.sums[(s * P::RS + r) * 4 + b.quarter] = z;
    }
  }
  stage += count * P::STAGES;
}

__device__ __forceinline__ float total(const Block& b, int row) {
  const float4 p = *(const float4*)(b.sums + row * 4);
  return (p.x + p.y) + (p.z + p.w);
}

template <int C>
__device__ __forceinline__ void publish(unsigned char* words, int row, const float* y) {
  if (C == 4) tell8(words + row * 2, pack(y[0], y[1]), pack(y[2 % C], y[3 % C]));
  if (C == 2) tell4(words + row * 2, pack(y[0], y[1 % C]));
  if (C == 1) tell2(words + row * 2, pack(y[0], 0.f));
}

// 1 / sqrt(mean(x^2) + eps) of what `squared` was given
__device__ __forceinline__ float scale_of(const Block& b) {
  return rsqrtf(((b.squares[0] + b.squares[1]) + (b.squares[2] + b.squares[3])) / H + EPS);
}
__device__ __forceinline__ void note_squares(Block& b, float a) {
  a = warp_sum(a);
  if (!b.lane) b.squares[b.warp] = a;
}

struct Hidden {  // the residual stream: each thread of a group has every 128th vector
  u32 h[H_VECTORS][4];

  __device__ void embed(Block& b) {
    const u16* row = b.args.embedding + (u64)b.args.token[0] * H;
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const int at = v * GROUP + b.in_group;
      uint4 y = at < H / 8 ? *(const uint4*)(row + at * 8) : make_uint4(0, 0, 0, 0);
      h[v][0] = y.x, h[v][1] = y.y, h[v][2] = y.z, h[v][3] = y.w;
#if HAS_EMBED_SCALE
#pragma unroll
      for (int i = 0; i < 4; i++) h[v][i] = pack(low(h[v][i]) * EMBED_SCALE, high(h[v][i]) * EMBED_SCALE);
#endif
    }
  }
  __device__ void add(Block& b, const unsigned char* words, const u16* post) {
    uint4 y[H_VECTORS];
    load_words<H>(b, words, y);
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
    if (!b.lane) b.squares[8 + b.warp] = a;
    b.all_of_group();
    const float* s = b.squares + 8 + 4 * b.group;
    factor = rsqrtf(((s[0] + s[1]) + (s[2] + s[3])) / H + EPS);
#endif
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const int at = v * GROUP + b.in_group;
      const u32 z[4] = {y[v].x, y[v].y, y[v].z, y[v].w};
#if HAS_POST_NORMS
      const uint4 w4 = at < H / 8 ? *(const uint4*)(post + at * 8) : make_uint4(0, 0, 0, 0);
      const u32 w[4] = {w4.x, w4.y, w4.z, w4.w};
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
  __device__ void normed(Block& b, const u16* weight, float* x) {  // times its scale, which comes at the end
    float a = 0;
#pragma unroll
    for (int v = 0; v < H_VECTORS; v++) {
      const int at = v * GROUP + b.in_group;
      const uint4 w4 = at < H / 8 ? *(const uint4*)(weight + at * 8) : make_uint4(0, 0, 0, 0);
      const u32 w[4] = {w4.x, w4.y, w4.z, w4.w};
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

template <int K>
__device__ void plain_input(Block& b, const unsigned char* words, float* x) {
  constexpr int N = (K / 8 + GROUP - 1) / GROUP;
  uint4 y[N];
  load_words<K>(b, words, y);
#pragma unroll
  for (int v = 0; v < N; v++) {
    const u32 z[4] = {y[v].x, y[v].y, y[v].z, y[v].w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[8 * v + 2 * i] = low(z[i]), x[8 * v + 2 * i + 1] = high(z[i]);
  }
}

constexpr int PER_TOKEN = D / 8, TOKENS_AT_ONCE = 32 / PER_TOKEN, ROUNDS = 2, TILE = ROUNDS * WARPS * TOKENS_AT_ONCE;
constexpr int PAIRS = D / 64;  // of elements that a lane has of a head

struct Splits {  // of the attended slots [first, end)
  i64 first;
  int length, size, count;
  __device__ Splits(const Layer& y) {
    first = y.span[1];
    length = (int)(y.span[2] - first);
    size = ((length + SPLITS - 1) / SPLITS + TILE - 1) / TILE * TILE;
    count = (length + size - 1) / size;
  }
};

// A head [D] of the published words, normalized and rotated: elements 2 (lane + 32 j), and the next.
__device__ void load_head(Block& b, const unsigned char* words, const u16* norm, const u16* angles, float (&e)[2 * PAIRS]) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    const u32 x = b.get(words + (b.lane + 32 * j) * 4);
    e[2 * j] = low(x);
    e[2 * j + 1] = high(x);
  }
  __syncwarp();
#if HAS_QK_NORM
  if (norm) {
    float a = 0;
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; j++) a = fmaf(e[j], e[j], a);
    const float factor = rsqrtf(warp_sum(a) / D + QK_EPS);
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; j++) e[j] = weighted(e[j] * factor, norm[2 * (b.lane + 32 * (j / 2)) + j % 2]);
  }
#endif
  if (!angles) return;
  float turned[2 * PAIRS];
#pragma unroll
  for (int j = 0; j < 2 * PAIRS; j++) {
    const int at = 2 * (b.lane + 32 * (j / 2)) + j % 2;
    // The partner is half a head away: in lane ^ 16 if a head is 64 wide, else in this lane.
    const float other = D == 64 ? __shfl_xor_sync(~0u, e[j], 16) : e[(j + PAIRS) % (2 * PAIRS)];
    const float sign = at < D / 2 ? -1.f : 1.f;
    turned[j] = rounded(rounded(e[j] * half_of(angles[at])) + rounded(sign * other * half_of(angles[D + at])));
  }
#pragma unroll
  for (int j = 0; j < 2 * PAIRS; j++) e[j] = turned[j];
}

__device__ void attend(Block& b, const Layer& y, unsigned char* words) {
  const Splits splits(y);
  const int sub = b.lane / PER_TOKEN, part = b.lane % PER_TOKEN;
  float* queries = b.scratch;                          // [G, D]
  float* key = queries + HEADS_PER_KV * D;             // [D], of the new token
  float* value = key + D;
  float* merged = value + D;                           // [WARPS, G, D + 2]
  for (int u = b.c; u < NKV * splits.count; u += b.blocks) {
    const int head = u % NKV, split = u / NKV;
    const bool has_new = split == splits.count - 1;
    const int begin = split * splits.size, rest = splits.length - begin;
    const int known = has_new ? rest - 1 : splits.size;
    const u16* keys = y.keys + head * y.head_stride + (splits.first + begin) * D + part * 8;
    const u16* values = y.values + head * y.head_stride + (splits.first + begin) * D + part * 8;
    uint4 ks[ROUNDS], vs[ROUNDS];
    auto load = [&](int tile) {
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const int t = tile + (i * WARPS + b.warp) * TOKENS_AT_ONCE + sub;
        ks[i] = vs[i] = make_uint4(0, 0, 0, 0);
        if (t < known) ks[i] = old16(keys + (i64)t * D), vs[i] = old16(values + (i64)t * D);
      }
    };
    load(0);
    const u16* angles = y.table ? y.table + b.args.position[0] * 2 * D : 0;
    for (int task = b.warp; task < HEADS_PER_KV + 2; task += WARPS) {
      const bool is_query = task < HEADS_PER_KV, is_key = task == HEADS_PER_KV;
      if (!is_query && !has_new) continue;
      const int row = is_query ? head * HEADS_PER_KV + task : is_key ? NQ + head : NQ + NKV + head;
      float e[2 * PAIRS];
      load_head(b, words + AT_QKV + row * D * 2, is_query ? y.q_norm : is_key ? y.k_norm : 0, is_query || is_key ? angles : 0, e);
      float* to = is_query ? queries + task * D : is_key ? key : value;
      u16* store = (is_key ? y.keys : y.values) + head * y.head_stride + y.slot[0] * D;
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int at = 2 * (b.lane + 32 * j);
        const float by = is_query ? SCALE * 1.4426950408889634f : 1.f;
        to[at] = e[2 * j] * by;
        to[at + 1] = e[2 * j + 1] * by;
        if (!is_query) *(u32*)(store + at) = pack(e[2 * j], e[2 * j + 1]);
      }
    }
    b.all_consumers();
    float top[HEADS_PER_KV], sum[HEADS_PER_KV], acc[HEADS_PER_KV][8];
#pragma unroll
    for (int g = 0; g < HEADS_PER_KV; g++) {
      top[g] = -INFINITY_, sum[g] = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) acc[g][i] = 0;
    }
    auto product = [&](const uint4& k, const float* q) {
      float a = low(k.x) * q[0], z = high(k.x) * q[1];
      a = fmaf(low(k.y), q[2], a), z = fmaf(high(k.y), q[3], z);
      a = fmaf(low(k.z), q[4], a), z = fmaf(high(k.z), q[5], z);
      a = fmaf(low(k.w), q[6], a), z = fmaf(high(k.w), q[7], z);
      a += z;
#pragma unroll
      for (int o = 1; o < PER_TOKEN; o <<= 1) a += __shfl_xor_sync(~0u, a, o);
      return a;
    };
    for (int tile = 0; tile < known; tile += TILE) {
      uint4 k[ROUNDS], v[ROUNDS];
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) k[i] = ks[i], v[i] = vs[i];
      load(tile + TILE);
#pragma unroll
      for (int g = 0; g < HEADS_PER_KV; g++) {
        float q[8], score[ROUNDS];
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = queries[g * D + part * 8 + i];
        float most = top[g];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
          const int t = tile + (i * WARPS + b.warp) * TOKENS_AT_ONCE + sub;
          score[i] = product(k[i], q);
          if (t >= known) score[i] = -INFINITY_;
          most = fmaxf(most, score[i]);
        }
        const float shrink = most == -INFINITY_ ? 0.f : exp2f(top[g] - most);
        top[g] = most;
        sum[g] *= shrink;
#pragma unroll
        for (int i = 0; i < 8; i++) acc[g][i] *= shrink;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
          const float p = score[i] == -INFINITY_ ? 0.f : exp2f(score[i] - most);
          const u32 z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
          sum[g] += p;
#pragma unroll
          for (int n = 0; n < 4; n++) acc[g][2 * n] = fmaf(p, low(z[n]), acc[g][2 * n]), acc[g][2 * n + 1] = fmaf(p, high(z[n]), acc[g][2 * n + 1]);
        }
      }
    }
    if (has_new && b.warp == 0) {
#pragma unroll
      for (int g = 0; g < HEADS_PER_KV; g++) {
        float a = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) a = fmaf(key[part * 8 + i], queries[g * D + part * 8 + i], a);
#pragma unroll
        for (int o = 1; o < PER_TOKEN; o <<= 1) a += __shfl_xor_sync(~0u, a, o);
        if (sub == 0) {
          const float most = fmaxf(top[g], a), shrink = exp2f(top[g] - most), p = exp2f(a - most);
          top[g] = most;
          sum[g] = fmaf(sum[g], shrink, p);
#pragma unroll
          for (int i = 0; i < 8; i++) acc[g][i] = fmaf(acc[g][i], shrink, p * value[part * 8 + i]);
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int g = 0; g < HEADS_PER_KV; g++) {
#pragma unroll
      for (int o = PER_TOKEN; o < 32; o <<= 1) {
        const float other = __shfl_xor_sync(~0u, top[g], o), most = fmaxf(top[g], other);
        const float mine = most == -INFINITY_ ? 0.f : exp2f(top[g] - most), theirs = most == -INFINITY_ ? 0.f : exp2f(other - most);
        top[g] = most;
        sum[g] = sum[g] * mine + __shfl_xor_sync(~0u, sum[g], o) * theirs;
#pragma unroll
        for (int i = 0; i < 8; i++) acc[g][i] = acc[g][i] * mine + __shfl_xor_sync(~0u, acc[g][i], o) * theirs;
      }
      if (sub == 0) {
        float* to = merged + (b.warp * HEADS_PER_KV + g) * (D + 2);
#pragma unroll
        for (int i = 0; i < 8; i++) to[part * 8 + i] = acc[g][i];
        if (!part) to[D] = top[g], to[D + 1] = sum[g];
      }
    }
    b.all_consumers();
    for (int e = b.thread; e < HEADS_PER_KV * D; e += CONSUMERS) {
      const int g = e / D, d = e % D;
      float most = -INFINITY_, a = 0, s = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) most = fmaxf(most, merged[(w * HEADS_PER_KV + g) * (D + 2) + D]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float* from = merged + (w * HEADS_PER_KV + g) * (D + 2);
        const float by = exp2f(from[D] - most);
        a = fmaf(by, from[d], a);
        s = fmaf(by, from[D + 1], s);
      }
      unsigned char* to = words + AT_PARTS + ((head * HEADS_PER_KV + g) * SPLITS + split) * PART * 4;
      tell4(to + d * 4, __float_as_uint(a));
      if (!d) tell8(to + D * 4, __float_as_uint(most), __float_as_uint(s));
    }
    b.all_consumers();
  }
}

// The partial attentions of one head, together.
__device__ void combine(Block& b, const Layer& y, unsigned char* words) {
  const Splits splits(y);
  constexpr int PARTS = CONSUMERS / D, MOST = (SPLITS + PARTS - 1) / PARTS;
  const int d = b.thread % D, first = b.thread / D;
  for (int head = b.blocks - 1 - b.c; head < NQ; head += b.blocks) {
    const unsigned char* from = words + AT_PARTS + head * SPLITS * PART * 4;
    float most = -INFINITY_, a = 0, s = 0;
    u32 value[MOST], top[MOST], sum[MOST];
    bool all;
    u32 spins = 0;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < MOST; i++) {
        const int split = first + i * PARTS;
        const unsigned char* at = from + split * PART * 4;
        if (split < splits.count) value[i] = look4(at + d * 4), top[i] = look4(at + D * 4), sum[i] = look4(at + D * 4 + 4);
      }
#pragma unroll
      for (int i = 0; i < MOST; i++)
        if (first + i * PARTS < splits.count) all &= value[i] != EMPTY && top[i] != EMPTY && sum[i] != EMPTY;
    } while (!__all_sync(~0u, all) && __any_sync(~0u, b.waits(spins)));
#pragma unroll
    for (int i = 0; i < MOST; i++)
      if (first + i * PARTS < splits.count) most = fmaxf(most, __uint_as_float(top[i]));
#pragma unroll
    for (int i = 0; i < MOST; i++)
      if (first + i * PARTS < splits.count) {
        const float by = exp2f(__uint_as_float(top[i]) - most);
        a = fmaf(by, __uint_as_float(value[i]), a);
        s = fmaf(by, __uint_as_float(sum[i]), s);
      }
    float* to = b.scratch + first * (D + 2);
    to[d] = a;
    if (!d) to[D] = most, to[D + 1] = s;
    b.all_consumers();
    if (b.thread < D / 2) {
      most = -INFINITY_;
      float x = 0, z = 0;
      s = 0;
#pragma unroll
      for (int p = 0; p < PARTS; p++) most = fmaxf(most, b.scratch[p * (D + 2) + D]);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const float* part = b.scratch + p * (D + 2);
        const float by = part[D] == -INFINITY_ ? 0.f : exp2f(part[D] - most);
        s = fmaf(by, part[D + 1], s);
        x = fmaf(by, part[2 * b.thread], x);
        z = fmaf(by, part[2 * b.thread + 1], z);
      }
      tell4(words + AT_A + (head * D + 2 * b.thread) * 2, pack(x / s, z / s));
    }
    b.all_consumers();
  }
}

__device__ void consume(Block& b) {
  const Args& args = b.args;
  const u32 step = *args.step;
  unsigned char* words = args.words + (step & 1) * WORDS;
  {
    uint4* others = (uint4*)(args.words + (~step & 1) * WORDS);  // for the next step
    for (u64 i = b.c * CONSUMERS + b.thread; i < WORDS / 16; i += (u64)b.blocks * CONSUMERS) others[i] = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  }
  u32 stage = 0;
  int turn = 0;
  Hidden hidden;
  constexpr int MOST = H > I ? (H > NQ * D ? H : NQ * D) : (I > NQ * D ? I : NQ * D);
  float x[(MOST / 8 + GROUP - 1) / GROUP * 8];
#define MARK(n) if (args.profile && b.thread == 0) args.profile[((i64)b.c * (L + 1) + l) * 16 + n] = clock64();
  hidden.embed(b);
  for (int l = 0; l < L; l++) {
    const Layer y = args.layers[l];
    unsigned char* own = words + (u64)l * LAYER_BYTES;
    MARK(0)
    if (l) hidden.add(b, own - LAYER_BYTES + AT_DOWN, args.layers[l - 1].post2);
    MARK(1)
    hidden.normed(b, y.norm1, x);
    {
      Share share(N_QKV, b.c, b.blocks, turn);
      stream<CutQKV>(b, x, share.count, stage);
      b.all_consumers();
      if (b.thread < share.count) {
        const int row = (share.first + b.thread * b.blocks) * C_QKV;
        const float scale = scale_of(b);
        float z[C_QKV];
#pragma unroll
        for (int r = 0; r < C_QKV; r++) z[r] = total(b, b.thread * C_QKV + r) * scale;
#if HAS_QKV_BIAS
#pragma unroll
        for (int r = 0; r < C_QKV; r++) {
          const int n = row + r;
          z[r] += half_of(n < NQ * D ? y.q_bias[n] : n < (NQ + NKV) * D ? y.k_bias[n - NQ * D] : y.v_bias[n - (NQ + NKV) * D]);
        }
#endif
        publish<C_QKV>(own + AT_QKV, row, z);
      }
      __syncwarp();
    }
    MARK(2)
    attend(b, y, own);
    MARK(3)
    combine(b, y, own);
    MARK(4)
    plain_input<NQ * D>(b, own + AT_A, x);
    MARK(5)
    {
      Share share(N_O, b.c, b.blocks, turn);
      stream<CutO>(b, x, share.count, stage);
      b.all_consumers();
      if (b.thread < share.count) {
        float z[C_O];
#pragma unroll
        for (int r = 0; r < C_O; r++) z[r] = total(b, b.thread * C_O + r);
        publish<C_O>(own + AT_O, (share.first + b.thread * b.blocks) * C_O, z);
      }
      __syncwarp();
    }
    MARK(6)
    hidden.add(b, own + AT_O, y.post1);
    MARK(7)
    hidden.normed(b, y.norm2, x);
    {
      Share share(N_GATE, b.c, b.blocks, turn);
      stream<CutGate>(b, x, share.count, stage);
      b.all_consumers();
      if (b.thread < share.count) {
        const float scale = scale_of(b);
        float z[C_GATE];
#pragma unroll
        for (int r = 0; r < C_GATE; r++) {
          const float gate = rounded(total(b, b.thread * 2 * C_GATE + r) * scale), up = rounded(total(b, b.thread * 2 * C_GATE + C_GATE + r) * scale);
          z[r] = rounded(activate(gate)) * up;
        }
        publish<C_GATE>(own + AT_M, (share.first + b.thread * b.blocks) * C_GATE, z);
      }
      __syncwarp();
    }
    MARK(8)
    plain_input<I>(b, own + AT_M, x);
    MARK(9)
    {
      Share share(N_DOWN, b.c, b.blocks, turn);
      stream<CutDown>(b, x, share.count, stage);
      b.all_consumers();
      if (b.thread < share.count) {
        float z[C_DOWN];
#pragma unroll
        for (int r = 0; r < C_DOWN; r++) z[r] = total(b, b.thread * C_DOWN + r);
        publish<C_DOWN>(own + AT_DOWN, (share.first + b.thread * b.blocks) * C_DOWN, z);
      }
      __syncwarp();
    }
    MARK(10)
  }
  const int l = L;
  MARK(0)
  hidden.add(b, words + (u64)(L - 1) * LAYER_BYTES + AT_DOWN, args.layers[L - 1].post2);
  hidden.normed(b, args.norm, x);
  MARK(1)
  Share share(N_HEAD, b.c, b.blocks, turn);
  float best = -INFINITY_;
  int token = V - 1;
  float scale = 0;
  for (int done = 0; done < share.count; done += HEAD_BLOCK) {
    const int count = min(HEAD_BLOCK, share.count - done);
    stream<CutHead>(b, x, count, stage);
    b.all_consumers();
    if (!done) scale = scale_of(b);
    if (b.thread < count) {
      const int row = (share.first + (done + b.thread) * b.blocks) * C_HEAD;
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
  unsigned char* after = ring + STAGE * SLOTS;
  float* sums = (float*)after;                     // [SUM_ROWS, 4]
  float* squares = sums + SUM_ROWS * 4;            // [16]
  float* scratch = squares + 16;
  u64* full = (u64*)(scratch + SCRATCH);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(shared(full + i)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0],4;" ::"r"(shared(full + SLOTS + i)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async;");
  }
  __syncthreads();
  Block block{args, (int)blockIdx.x, (int)gridDim.x, warp, (int)threadIdx.x % 32, (int)threadIdx.x, warp / 4, warp % 4, (int)threadIdx.x % GROUP, clock64(), sums, squares, scratch, full, full + SLOTS};
  if (warp == WARPS) {
    if (block.lane == 0) produce(block);
  } else {
    consume(block);
  }
}
