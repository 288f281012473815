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
#ifdef EXCHANGED_BYTES
static_assert(2 * WORDS == EXCHANGED_BYTES, "the host has made another buffer");
#endif

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
__device__ __forceinline__ void tell8(void* p, u32 x, u32 y) { asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"((u64)y << 32 | x) : "memory"); }
__device__ __forceinline__ void tell2(void* p, u32 x) { asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(p), "h"((u16)x) : "memory"); }
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

// Whether a wait has lasted too long, here or in another block: then all of them end.
__device__ __noinline__ bool is_late(int* error, i64 begun) {
  if (*(volatile int*)error == 0 && clock64() - begun <= PATIENCE) return false;
  *(volatile int*)error = 1;
  return true;
}

struct Block {
  const Args& args;
  const int c, warp, lane, thread, group, quarter, in_group;
  const i64 begun;
  float *sums, *squares, *scratch;
  u64 *full, *empty;
  volatile int* flight;  // stages that may be under way
  bool failed = false;

  __device__ bool waits(u32& spins) {  // false: give up
    if ((++spins & 1023) == 0) failed = failed || is_late(args.error, begun);
    return !failed;
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
    while (!(is_low(x) & is_high(x)) && waits(spins)) x = look4(p);
    return x;
  }
  __device__ u32 get_float(const void* p) {
    u32 x = look4(p), spins = 0;
    while (x == EMPTY && waits(spins)) x = look4(p);
    return x;
  }
};

// How a phase is cut: `chunks` of C output rows go to the blocks in turn; a stage holds RS rows of K.
template <int N_, int K_, int C_, int VR_, int RS_>
struct Cut {
  static constexpr int N = N_, K = K_, C = C_, VR = VR_, RS = RS_, VECTORS = (K_ / 8 + GROUP - 1) / GROUP;
  static constexpr int CHUNKS = RS_ > VR_ ? RS_ / VR_ : 1;  // in a stage
  __host__ __device__ static constexpr int stages(int chunks) { return (chunks * VR_ + RS_ - 1) / RS_; }
};
constexpr int N_QKV = QKV / C_QKV, N_O = H / C_O, N_GATE = I / C_GATE, N_DOWN = H / C_DOWN, N_HEAD = V / C_HEAD;
using CutQKV = Cut<N_QKV, H, C_QKV, C_QKV, RS_QKV>;
using CutO = Cut<N_O, NQ * D, C_O, C_O, RS_O>;
using CutGate = Cut<N_GATE, H, C_GATE, 2 * C_GATE, RS_GATE>;
using CutDown = Cut<N_DOWN, I, C_DOWN, C_DOWN, RS_DOWN>;
using CutHead = Cut<N_HEAD, H, C_HEAD, C_HEAD, RS_HEAD>;
constexpr int HEAD_BLOCK = SUM_ROWS / RS_HEAD * RS_HEAD / C_HEAD;  // chunks, whole stages
constexpr int H_VECTORS = (H / 8 + GROUP - 1) / GROUP;

template <int N>
struct Share {  // of N chunks: first, first + BLOCKS, ...
  int first, count;
  __device__ Share(int c, int& turn) {
    first = c - turn;
    if (first < 0) first += BLOCKS;
    count = first < N ? (N - first + BLOCKS - 1) / BLOCKS : 0;
    turn += N % BLOCKS;
    if (turn >= BLOCKS) turn -= BLOCKS;
  }
};

__device__ void produce(Block& b) {
  const Args& args = b.args;
  u32 issued = 0, arrived = 0;
  int turn = 0;
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  auto copy = [&](const u16* from, int slot, u32 at, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared(ring + slot * STAGE + at)), "l"(from), "r"(bytes), "r"(shared(b.full + slot)), "l"(policy) : "memory");
  };
  auto next = [&](u32 bytes) -> int {
    int slot = issued % SLOTS;
    if (issued >= SLOTS) b.wait(b.empty + slot, (issued / SLOTS - 1) & 1);
    while (arrived < issued && issued - arrived >= (u32)*b.flight) {
      b.wait(b.full + arrived % SLOTS, (arrived / SLOTS) & 1);
      arrived++;
    }
    if (b.failed) return -1;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared(b.full + slot)), "r"(bytes) : "memory");
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
        if (r < rows) copy(source(share.first + (row + r) / P::VR * BLOCKS, (row + r) % P::VR), slot, r * P::K * 2, run * P::K * 2);
    }
  };
  for (int l = 0; l < L; l++) {
    const Layer y = args.layers[l];
    rows(CutQKV{}, [&](int i, int v) {
      int r = i * C_QKV + v;
      return r < NQ * D ? y.q + (u64)r * H : r < (NQ + NKV) * D ? y.k + (u64)(r - NQ * D) * H : y.v + (u64)(r - (NQ + NKV) * D) * H;
    });
    rows(CutO{}, [&](int i, int v) { return y.o + (u64)(i * C_O + v) * (NQ * D); });
    rows(CutGate{}, [&](int i, int v) { return (v < C_GATE ? y.gate : y.up) + (u64)(i * C_GATE + v % C_GATE) * H; });
    rows(CutDown{}, [&](int i, int v) { return y.down + (u64)(i * C_DOWN + v) * I; });
  }
  rows(CutHead{}, [&](int i, int v) { return args.head + (u64)(i * C_HEAD + v) * H; });
  // No copy may be under way when the block ends.
  for (u32 s = issued > SLOTS ? issued - SLOTS : 0; s < issued; s++) {
    u32 done = 0;
    while (!done)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(shared(b.full + s % SLOTS)), "r"((s / SLOTS) & 1) : "memory");
  }
}

// The inputs of a phase, 16 bytes of every 128th vector for each thread of a group.
template <int K, int C>
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
    sums[r] = a[r][0];
#pragma unroll
    for (int i = 1; i < LANES; i++) sums[r] += a[r][i];
  }
}

// A group has every second stage. Four rows are added over a warp at once.
template <class P>
__device__ void stream(Block& b, const float* x, int count, u32& stage) {
  constexpr int AT_ONCE = P::RS == 2 ? 2 : 1, ROWS = P::RS * AT_ONCE, PADDED = (ROWS + 3) / 4 * 4;
  const int stages = P::stages(count);
  for (int s = (stage ^ b.group) & 1; s < stages; s += 2 * AT_ONCE) {
    float sums[PADDED];
#pragma unroll
    for (int i = 0; i < PADDED; i++) sums[i] = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (s + 2 * i < stages) multiply<P>(b, x, stage + s + 2 * i, sums + i * P::RS);
    if (ROWS == 1) {
      const float z = warp_sum(sums[0]);
      if (!b.lane) b.sums[s * 4 + b.quarter] = z;
    }
#pragma unroll
    for (int i = 0; i < PADDED && ROWS > 1; i += 4) {
      const float z = warp_sums(b, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
      const int n = i + b.lane / 8;  // of ROWS
      const int row = (s + 2 * (n / P::RS)) * P::RS + n % P::RS;
      if (b.lane % 8 == 0 && n < ROWS) b.sums[row * 4 + b.quarter] = z;
    }
  }
  stage += stages;
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
  template <int C>
  __device__ __forceinline__ void add(Block& b, const unsigned char* words, const u16* post) {
    uint4 y[H_VECTORS];
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

template <int K, int C>
__device__ void plain_input(Block& b, const unsigned char* words, float* x) {
  constexpr int N = (K / 8 + GROUP - 1) / GROUP;
  uint4 y[N];
  load_words<K, C>(b, words, y);
#pragma unroll
  for (int v = 0; v < N; v++) {
    const u32 z[4] = {y[v].x, y[v].y, y[v].z, y[v].w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[8 * v + 2 * i] = low(z[i]), x[8 * v + 2 * i + 1] = high(z[i]);
  }
}

// A quarter, half or whole warp has a token of a head. Warps share out head groups, then tokens.
constexpr int PER_TOKEN = D / 8, HEADS_AT_ONCE = 32 / PER_TOKEN;
constexpr int head_groups(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : 8; }
constexpr int HEAD_GROUPS = head_groups((HEADS_PER_KV + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE), SLICES = WARPS / HEAD_GROUPS;
constexpr int ROUNDS = 8, TILE = ROUNDS * SLICES;
constexpr int PAIRS = D / 64;  // of elements that a lane has of a head
constexpr float NOTHING = -1e30f;  // less than any score

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
  const int part = b.lane % PER_TOKEN * 8, slice = b.warp / HEAD_GROUPS;
  const int own = b.warp % HEAD_GROUPS * HEADS_AT_ONCE + b.lane / PER_TOKEN;  // head of the KV head
  float* queries = b.scratch;                          // [G, D]
  float* key = queries + HEADS_PER_KV * D;             // [D], of the new token
  float* value = key + D;
  float* merged = value + D;                           // [SLICES, G, D + 2]
  for (int u = b.c; u < NKV * splits.count; u += BLOCKS) {
    const int head = u % NKV, split = u / NKV;
    const bool has_new = split == splits.count - 1;
    const int begin = split * splits.size;
    const int known = has_new ? splits.length - begin - 1 : splits.size;
    const i64 at = head * y.head_stride + (splits.first + begin) * D + part;
    uint4 ks[ROUNDS], vs[ROUNDS];
    auto load = [&](int tile) {
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const int t = tile + i * SLICES + slice;
        ks[i] = vs[i] = make_uint4(0, 0, 0, 0);
        if (t < known) ks[i] = old16(y.keys + at + (i64)t * D), vs[i] = old16(y.values + at + (i64)t * D);
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
    float top = NOTHING, sum = 0, acc[8], q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) acc[i] = 0, q[i] = queries[min(own, HEADS_PER_KV - 1) * D + part + i];
    auto add_up = [&](float a) {
#pragma unroll
      for (int o = 1; o < PER_TOKEN; o <<= 1) a += __shfl_xor_sync(~0u, a, o);
      return a;
    };
    for (int tile = 0; tile < known; tile += TILE) {
      float score[ROUNDS], most = top;
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const uint4 k = ks[i];
        float a = low(k.x) * q[0], z = high(k.x) * q[1];
        a = fmaf(low(k.y), q[2], a), z = fmaf(high(k.y), q[3], z);
        a = fmaf(low(k.z), q[4], a), z = fmaf(high(k.z), q[5], z);
        a = fmaf(low(k.w), q[6], a), z = fmaf(high(k.w), q[7], z);
        score[i] = add_up(a + z);
        if (tile + i * SLICES + slice >= known) score[i] = NOTHING;
        most = fmaxf(most, score[i]);
      }
      const float shrink = exp2f(top - most);
      top = most;
      sum *= shrink;
#pragma unroll
      for (int i = 0; i < 8; i++) acc[i] *= shrink;
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const float p = score[i] > NOTHING ? exp2f(score[i] - most) : 0.f;
        const u32 z[4] = {vs[i].x, vs[i].y, vs[i].z, vs[i].w};
        sum += p;
#pragma unroll
        for (int n = 0; n < 4; n++) acc[2 * n] = fmaf(p, low(z[n]), acc[2 * n]), acc[2 * n + 1] = fmaf(p, high(z[n]), acc[2 * n + 1]);
      }
      load(tile + TILE);
    }
    if (has_new && slice == 0) {
      float a = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) a = fmaf(key[part + i], q[i], a);
      a = add_up(a);
      const float most = fmaxf(top, a), shrink = exp2f(top - most), p = exp2f(a - most);
      top = most;
      sum = fmaf(sum, shrink, p);
#pragma unroll
      for (int i = 0; i < 8; i++) acc[i] = fmaf(acc[i], shrink, p * value[part + i]);
    }
    if (own < HEADS_PER_KV) {
      float* to = merged + (slice * HEADS_PER_KV + own) * (D + 2);
#pragma unroll
      for (int i = 0; i < 8; i++) to[part + i] = acc[i];
      if (!part) to[D] = top, to[D + 1] = sum;
    }
    b.all_consumers();
    for (int e = b.thread; e < HEADS_PER_KV * D; e += CONSUMERS) {
      const int g = e / D, d = e % D;
      const float* from = merged + g * (D + 2);
      float most = NOTHING, a = 0, s = 0;
#pragma unroll
      for (int w = 0; w < SLICES; w++) most = fmaxf(most, from[w * HEADS_PER_KV * (D + 2) + D]);
#pragma unroll
      for (int w = 0; w < SLICES; w++) {
        const float* it = from + w * HEADS_PER_KV * (D + 2);
        const float by = exp2f(it[D] - most);
        a = fmaf(by, it[d], a);
        s = fmaf(by, it[D + 1], s);
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
  constexpr int PARTS = CONSUMERS / D, AT_ONCE = 4;
  const int d = b.thread % D, first = b.thread / D;
  for (int head = BLOCKS - 1 - b.c; head < NQ; head += BLOCKS) {
    const unsigned char* from = words + AT_PARTS + head * SPLITS * PART * 4;
    float most = NOTHING, a = 0, s = 0;
    for (int begin = first; begin < splits.count; begin += AT_ONCE * PARTS) {
      u32 value[AT_ONCE], top[AT_ONCE], sum[AT_ONCE], spins = 0;
      bool all;
      do {
        all = true;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const unsigned char* at = from + min(begin + i * PARTS, splits.count - 1) * PART * 4;
          value[i] = look4(at + d * 4), top[i] = look4(at + D * 4), sum[i] = look4(at + D * 4 + 4);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) all &= value[i] != EMPTY && top[i] != EMPTY && sum[i] != EMPTY;
      } while (!all && b.waits(spins));
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (begin + i * PARTS < splits.count) {
          const float best = fmaxf(most, __uint_as_float(top[i]));
          const float old = exp2f(most - best), by = exp2f(__uint_as_float(top[i]) - best);
          most = best;
          a = fmaf(by, __uint_as_float(value[i]), a * old);
          s = fmaf(by, __uint_as_float(sum[i]), s * old);
        }
    }
    float* to = b.scratch + first * (D + 2);
    to[d] = a;
    if (!d) to[D] = most, to[D + 1] = s;
    b.all_consumers();
    if (b.thread < D / 2) {
      most = NOTHING;
      float x = 0, z = 0;
      s = 0;
#pragma unroll
      for (int p = 0; p < PARTS; p++) most = fmaxf(most, b.scratch[p * (D + 2) + D]);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const float* part = b.scratch + p * (D + 2);
        const float by = exp2f(part[D] - most);
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
    for (u64 i = b.c * CONSUMERS + b.thread; i < WORDS / 16; i += (u64)BLOCKS * CONSUMERS) others[i] = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  }
  u32 stage = 0;
  int turn = 0;
  Hidden hidden;
  constexpr int MOST = H > I ? (H > NQ * D ? H : NQ * D) : (I > NQ * D ? I : NQ * D);
  float x[(MOST / 8 + GROUP - 1) / GROUP * 8];
#if PROFILE
#define MARK(n) if (b.thread == 0) args.profile[((i64)b.c * (L + 1) + l) * 16 + n] = clock64();
#else
#define MARK(n)
#endif
  hidden.embed(b);
  for (int l = 0; l < L; l++) {
    const Layer y = args.layers[l];
    unsigned char* own = words + (u64)l * LAYER_BYTES;
    MARK(0)
    if (l) hidden.add<C_DOWN>(b, own - LAYER_BYTES + AT_DOWN, args.layers[l - 1].post2);
    MARK(1)
    hidden.normed(b, y.norm1, x);
    {
      Share<N_QKV> share(b.c, turn);
      stream<CutQKV>(b, x, share.count, stage);
      b.all_consumers();
      if (b.thread < share.count) {
        const int row = (share.first + b.thread * BLOCKS) * C_QKV;
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
    plain_input<NQ * D, 2>(b, own + AT_A, x);
    MARK(5)
    {
      Share<N_O> share(b.c, turn);
      stream<CutO>(b, x, share.count, stage);
      b.all_consumers();
      if (b.thread < share.count) {
        float z[C_O];
#pragma unroll
        for (int r = 0; r < C_O; r++) z[r] = total(b, b.thread * C_O + r);
        publish<C_O>(own + AT_O, (share.first + b.thread * BLOCKS) * C_O, z);
      }
      __syncwarp();
    }
    MARK(6)
    hidden.add<C_O>(b, own + AT_O, y.post1);
    MARK(7)
    hidden.normed(b, y.norm2, x);
    if (!b.thread) *b.flight = FLIGHT_STREAM;
    {
      Share<N_GATE> share(b.c, turn);
      stream<CutGate>(b, x, share.count, stage);
      if (!b.thread) *b.flight = FLIGHT_WAIT;
      b.all_consumers();
      if (b.thread < share.count) {
        const float scale = scale_of(b);
        float z[C_GATE];
#pragma unroll
        for (int r = 0; r < C_GATE; r++) {
          const float gate = rounded(total(b, b.thread * 2 * C_GATE + r) * scale), up = rounded(total(b, b.thread * 2 * C_GATE + C_GATE + r) * scale);
          z[r] = rounded(activate(gate)) * up;
        }
        publish<C_GATE>(own + AT_M, (share.first + b.thread * BLOCKS) * C_GATE, z);
      }
      __syncwarp();
    }
    MARK(8)
    plain_input<I, C_GATE>(b, own + AT_M, x);
    MARK(9)
    if (!b.thread) *b.flight = FLIGHT_STREAM;
    {
      Share<N_DOWN> share(b.c, turn);
      stream<CutDown>(b, x, share.count, stage);
      if (!b.thread) *b.flight = FLIGHT_WAIT;
      b.all_consumers();
      if (b.thread < share.count) {
        float z[C_DOWN];
#pragma unroll
        for (int r = 0; r < C_DOWN; r++) z[r] = total(b, b.thread * C_DOWN + r);
        publish<C_DOWN>(own + AT_DOWN, (share.first + b.thread * BLOCKS) * C_DOWN, z);
      }
      __syncwarp();
    }
    MARK(10)
  }
  const int l = L;
  MARK(0)
  hidden.add<C_DOWN>(b, words + (u64)(L - 1) * LAYER_BYTES + AT_DOWN, args.layers[L - 1].post2);
  hidden.normed(b, args.norm, x);
  if (!b.thread) *b.flight = FLIGHT_STREAM;
  MARK(1)
  Share<N_HEAD> share(b.c, turn);
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
  unsigned char* after = ring + STAGE * SLOTS;
  float* sums = (float*)after;                     // [SUM_ROWS, 4]
  float* squares = sums + SUM_ROWS * 4;            // [16]
  float* scratch = squares + 16;
  u64* full = (u64*)(scratch + SCRATCH);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    *(volatile int*)(full + 2 * SLOTS) = FLIGHT_STREAM;
    for (int i = 0; i < SLOTS; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(shared(full + i)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0],4;" ::"r"(shared(full + SLOTS + i)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async;");
  }
  __syncthreads();
  Block block{args, (int)blockIdx.x, warp, (int)threadIdx.x % 32, (int)threadIdx.x, warp / 4, warp % 4, (int)threadIdx.x % GROUP, clock64(), sums, squares, scratch, full, full + SLOTS, (volatile int*)(full + 2 * SLOTS)};
  if (warp == WARPS) {
    if (block.lane == 0) produce(block);
  } else {
    consume(block);
  }
}
