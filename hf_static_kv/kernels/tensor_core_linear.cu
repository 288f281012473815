// Linear layers of 2 to 16 tokens on tensor cores: see tensor_core_linear_cuda.py.
//
// CLUSTER blocks compute ROW_TILES tiles of 16 output features, and all of their warps share K. In a step a warp
// multiplies the tiles [16, 32] of a weight by the same columns of 8 tokens:
//
//     lane 4 g + t      rows g and g + 8 of a tile, and token g: of each the columns 8 t to 8 t + 7
//     mma.m16n8k16      wants 4 columns of a lane, and any 4: a sum has no order of columns
//
// So a lane reads 16 bytes as they lie in memory, and neither weights nor tokens go through shared memory. It reads
// DEPTH steps before it waits for the kernel that writes x.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct Weight {
  const u16 *values, *bias;
  i64 rows;
};

struct Args {
  Weight weights[3];
  const u16* x;
  u16* y;
  i64 tokens, width;  // of y
};

constexpr int SPAN = 32, LANE_COLUMNS = 8, TOKENS = 8 * TOKEN_TILES;
constexpr int ROWS = 16 * ROW_TILES;
constexpr int OWN_ROWS = IS_GATED ? ROWS / 2 : ROWS;  // gate and up have 8 rows of a tile each
constexpr int SHARES = CLUSTER * WARPS;               // of K
constexpr int STEPS = (K / SPAN + SHARES - 1) / SHARES;
#ifndef EARLY
#define EARLY 1
#endif
constexpr bool IS_EVEN = K / SPAN % SHARES == 0;
static_assert(K % SPAN == 0, "rows of whole steps");
static_assert(ROW_TILES % CLUSTER == 0, "a block finishes whole tiles");

__device__ __forceinline__ float number(u16 x) {
#if IS_HALF
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  return __uint_as_float((u32)x << 16);
#endif
}

__device__ __forceinline__ u16 stored(float x) {
  u16 y;
#if IS_HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
  return y;
}

__device__ __forceinline__ float rounded(float x) { return number(stored(x)); }

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if IS_HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1  // silu
  return x / (1.f + __expf(-x));
#elif ACTIVATION == 2  // gelu_tanh: 0.5 * x * (1 + tanh(inner)) without overflow
  float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x * (1.f - 1.f / (1.f + __expf(2.f * inner)));
#elif ACTIVATION == 3  // gelu
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
#elif ACTIVATION == 4  // relu
  return x < 0.f ? 0.f : x;  // keeps a NaN
#else
  return x;
#endif
}

// `volatile` and without `.nc`: else the compiler would move the reads of weights behind the wait.
__device__ __forceinline__ uint4 read_weights(const uint4* at) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
  return x;
}

__device__ __forceinline__ uint4 read(const u16* at) {
  uint4 x;
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
  return x;
}

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Where a block of the cluster has what this block has here.
__device__ __forceinline__ u32 of_block(u32 own, u32 block) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(own), "r"(block));
  return at;
}

// Sums from all blocks of the cluster, and a barrier that opens when they are here.
struct Inbox {
  float sums[CLUSTER][ROWS / CLUSTER][TOKENS];
  unsigned long long barrier;

  __device__ void open() {
    if (threadIdx.x == 0)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared(&barrier)), "r"((u32)sizeof(sums)) : "memory");
    __syncthreads();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  __device__ void wait_for_open() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
  // Four sums of a row to the block that finishes it.
  __device__ void send(int from, int row, int token, const float (&x)[4]) {
    const u32 to = row / (ROWS / CLUSTER);
    const u32 at = of_block(shared(&sums[from][row % (ROWS / CLUSTER)][token]), to);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(of_block(shared(&barrier), to)) : "memory");
  }
  __device__ void wait() {
    u32 done = 0;
    while (!done)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(shared(&barrier)) : "memory");
  }
};

// The weight of a cluster, the first of its rows in it, and of its columns in y.
struct Place {
  int weight = 0, row, column = 0;
  __device__ Place(const Args& args) : row((int)blockIdx.x / CLUSTER * OWN_ROWS) {
    if (IS_GATED) return;
#pragma unroll
    for (int i = 0; i < NUM_WEIGHTS - 1; i++) {
      const int rows = (args.weights[i].rows + ROWS - 1) / ROWS * ROWS;
      if (weight == i && row >= rows) {
        row -= rows;
        column += args.weights[i].rows;
        weight = i + 1;
      }
    }
  }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(WARPS * 32, MIN_BLOCKS) tensor_core_linear(const __grid_constant__ Args args) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x % CLUSTER;
  const Place place(args);
  const Weight& own = args.weights[place.weight];
  const Weight& other = IS_GATED ? args.weights[1] : own;  // of the lower half of a tile
  const i64 last = own.rows - 1;  // again behind the end; its sums are not stored
  const uint4* at[ROW_TILES][2];
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    const i64 first = place.row + r * (OWN_ROWS / ROW_TILES) + g;
    at[r][0] = (const uint4*)(own.values + min(first, last) * K) + t;
    at[r][1] = (const uint4*)(other.values + min(first + (IS_GATED ? 0 : 8), last) * K) + t;
  }
  uint4 tiles[DEPTH][ROW_TILES][2];
  auto read_step = [&](uint4(&tile)[ROW_TILES][2], int step) {
    if (!IS_EVEN && step >= K / SPAN) return;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) tile[r][h] = read_weights(at[r][h] + step * (SPAN / LANE_COLUMNS));
  };
  const int share = block * WARPS + warp;
  __shared__ __align__(16) Inbox inbox;
  if (CLUSTER > 1) inbox.open();
#pragma unroll
  for (int d = 0; d < DEPTH; d++) read_step(tiles[d], share + SHARES * d);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  float sums[ROW_TILES][TOKEN_TILES][4] = {};
  const u16* x[TOKEN_TILES];
#pragma unroll
  for (int m = 0; m < TOKEN_TILES; m++) x[m] = args.x + min((i64)(8 * m + g), args.tokens - 1) * K + t * LANE_COLUMNS;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int step = share + SHARES * i;
    if (!IS_EVEN && step >= K / SPAN) break;
    uint4 z[TOKEN_TILES];
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++) z[m] = read(x[m] + step * SPAN);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const uint4 a = tiles[i % DEPTH][r][0], b = tiles[i % DEPTH][r][1];
#pragma unroll
      for (int m = 0; m < TOKEN_TILES; m++) {
        multiply(sums[r][m], a.x, b.x, a.y, b.y, z[m].x, z[m].y);
        multiply(sums[r][m], a.z, b.z, a.w, b.w, z[m].z, z[m].w);
      }
    }
    if (i + DEPTH < STEPS) read_step(tiles[i % DEPTH], step + SHARES * DEPTH);
  }
  if (!EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  // The sums of the warps are added in their order, and then those of the blocks.
  __shared__ float parts[WARPS][ROWS][TOKENS + 1];  // one more: no conflicts of banks
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
      for (int j = 0; j < 4; j++) parts[warp][16 * r + g + j / 2 * 8][8 * m + 2 * t + j % 2] = sums[r][m][j];
  __syncthreads();
  if (CLUSTER > 1) {
    inbox.wait_for_open();
    for (int i = threadIdx.x; i < ROWS * TOKENS / 4; i += WARPS * 32) {
      const int row = i / (TOKENS / 4), token = i % (TOKENS / 4) * 4;
      float total[4] = {};
#pragma unroll
      for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int j = 0; j < 4; j++) total[j] += parts[w][row][token + j];
      inbox.send(block, row, token, total);
    }
    inbox.wait();
  }
  constexpr int FINISHED = OWN_ROWS / CLUSTER, TILE = OWN_ROWS / ROW_TILES;  // rows of a block, and of a tile
  for (int i = threadIdx.x; i < FINISHED * args.tokens; i += WARPS * 32) {
    const int token = i / FINISHED, finished = i % FINISHED, row = block * FINISHED + finished;
    const int at = finished / TILE * 16 + finished % TILE;  // among those of the tiles
    float total = 0.f, up = 0.f;
#pragma unroll
    for (int p = 0; p < (CLUSTER > 1 ? CLUSTER : WARPS); p++) {
      total += CLUSTER > 1 ? inbox.sums[p][at][token] : parts[p][at][token];
      if (IS_GATED) up += CLUSTER > 1 ? inbox.sums[p][at + 8][token] : parts[p][at + 8][token];
    }
    if (place.row + row > last) continue;
    if (HAS_BIAS) total += number(own.bias[place.row + row]);
    if (IS_GATED) total = rounded(activate(rounded(total))) * rounded(up);
    args.y[token * args.width + place.column + place.row + row] = stored(total);
  }
}
