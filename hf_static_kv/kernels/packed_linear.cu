// Linear layers of one token with weights of four bits, on tensor cores: see packed_linear_cuda.py.
//
// One block on each multiprocessor computes tiles of 16 output features in turn, and its warps share K. In a step a
// warp multiplies a tile [16, 128] of a weight:
//
//     lane 4 g + t      of rows g and g + 8 the 16 bytes t: 32 codes
//     table             of a byte both values side by side, once for each lane: no two lanes meet in a bank
//     mma.m16n8k16      wants 4 columns of a lane, and any 4: a sum has no order of columns
//     column n of it    the inputs of group n of the step, and zeros: so each group has a sum of its own
//
// The warps end a tile in turn: one adds the sums of all and writes the features, and the others go on. Each waits for
// all others once in WARPS tiles, so none is so far ahead that it writes over sums that are not read yet.
//
// A step is read DEPTH steps before it is used, the first ones before the wait for the kernel that writes x.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

struct Weight {
  const u32* codes;
  const void *scales, *zeros;
  const float *nested, *absmax, *offset;
  const u16* bias;
  i64 rows, row_stride, group_stride;  // of scales and zeros
};

struct Args {
  Weight weights[3];
  const float* table;
  const u16 *x, *norm, *residual;
  u16* y;
  i64 tiles;
  float midpoint, factor, eps, norm_offset;
};

constexpr int STEP = 128, LANE_COLUMNS = 32, ROWS = 16, THREADS = 32 * WARPS;
constexpr int OWN_ROWS = IS_GATED ? ROWS / 2 : ROWS;  // gate and up have 8 rows of a tile each
constexpr int STEPS = K / STEP, SHARE = (STEPS + WARPS - 1) / WARPS;  // of a row, and of a warp
constexpr int GROUPS = GROUP < STEP ? STEP / GROUP : 1;               // of a step
constexpr int SCALES = GROUPS > 1 ? 2 : 1;                            // of a row that a lane needs in a step
constexpr int TABLE_BYTES = 65536, NESTED_GROUP = 256;
static_assert(K % STEP == 0 && (GROUP % STEP == 0 || STEP % GROUP == 0) && GROUPS <= 4, "whole groups in a step");

// TABLE_BYTES; then the inputs, zeros, a table of nested scales and their offset for each weight, sums of WARPS tiles, and
// sums of squares.
extern __shared__ __align__(256) unsigned char memory[];
constexpr int AT_X = TABLE_BYTES, AT_NOTHING = AT_X + 2 * K, AT_NESTED = AT_NOTHING + 2 * LANE_COLUMNS, NESTED_FLOATS = 260, AT_SUMS = AT_NESTED + (IS_NESTED ? 4 * NESTED_FLOATS * NUM_WEIGHTS : 0),
              AT_SQUARES = AT_SUMS + WARPS * WARPS * ROWS * 4, SHARED_BYTES = AT_SQUARES + WARPS * 4;

#ifdef SHARED_BYTES_OF_HOST
static_assert(SHARED_BYTES == SHARED_BYTES_OF_HOST, "the host gives another size");
#endif

#ifndef EMULATED
// A number in the table, where `memory` begins. As an immediate its address costs no addition for each lookup.
constexpr u32 MEMORY = 1024;
__device__ __forceinline__ void check_memory() {
  if ((u32)__cvta_generic_to_shared(memory) != MEMORY) __trap();
}
__device__ __forceinline__ u32 looked_up(u32 at) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1 + %2];" : "=r"(x) : "r"(at), "n"(MEMORY));
  return x;
}
__device__ __forceinline__ uint4 read_codes(const u32* at) {  // not moved behind the wait
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
  return x;
}
__device__ __forceinline__ void arrive(int barrier) { asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory"); }
__device__ __forceinline__ void wait_for_all(int barrier) { asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory"); }
__device__ __forceinline__ void wait_for_x() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
#endif

__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float number(u16 x) { return low(x); }
__device__ __forceinline__ float rounded(float x) { return low(pack(x, 0.f)); }

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

// --- the table, and the inputs

__device__ __forceinline__ float value_of(const Args& args, int code) { return HAS_TABLE ? args.table[code] : code - args.midpoint; }

__device__ __forceinline__ float* nested_of(int weight) { return (float*)(memory + AT_NESTED) + weight * NESTED_FLOATS; }

__device__ __forceinline__ void write_tables(const Args& args) {
  for (int i = threadIdx.x; i < 256 * 8; i += THREADS) {
    const int byte = i / 8, first = IS_HIGH_FIRST ? byte >> 4 : byte & 15, second = IS_HIGH_FIRST ? byte & 15 : byte >> 4;
    const u32 both = pack(value_of(args, first), value_of(args, second));
    *(uint4*)(memory + byte * 256 + i % 8 * 16) = make_uint4(both, both, both, both);
  }
  for (int w = 0; IS_NESTED && w < NUM_WEIGHTS; w++)
    for (int i = threadIdx.x; i <= NESTED_GROUP; i += THREADS)
      nested_of(w)[i] = i < NESTED_GROUP ? args.weights[w].nested[i] : *args.weights[w].offset;
}

// The place of column k among those that lanes read.
__device__ __forceinline__ int place_of(int k) {
#if IS_TILED  // packed.py: word j = 4 q + i has the columns 32 i + 2 q + TILE_STEPS
  const int word = k % STEP / 32, t = k % 8 / 2, position = k % 32 / 8 + 4 * (k % 2);
  return k / STEP * STEP + LANE_COLUMNS * t + 8 * word + position;
#else
  return k;
#endif
}

// The inputs times the weight of the norm, and this warp's sum of their squares.
__device__ __forceinline__ void write_inputs(const Args& args) {
  if (threadIdx.x < LANE_COLUMNS / 2) ((u32*)(memory + AT_NOTHING))[threadIdx.x] = 0;
  float squares = 0;
  for (int k = 8 * threadIdx.x; k < K; k += 8 * THREADS) {
    const uint4 x = *(const uint4*)(args.x + k);
    u32 pairs[4] = {x.x, x.y, x.z, x.w};
#if HAS_NORM
    const uint4 w = *(const uint4*)(args.norm + k);
    const u32 weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = low(pairs[i]), b = high(pairs[i]);
      squares += a * a + b * b;
      pairs[i] = pack(a * (args.norm_offset + low(weights[i])), b * (args.norm_offset + high(weights[i])));
    }
#endif
    u16* to = (u16*)(memory + AT_X);
    if (!IS_TILED) *(uint4*)(to + k) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#pragma unroll
    for (int i = 0; IS_TILED && i < 8; i++) to[place_of(k + i)] = (u16)(pairs[i / 2] >> 16 * (i % 2));
  }
#pragma unroll
  for (int i = 16; HAS_NORM && i; i >>= 1) squares += __shfl_xor_sync(~0u, squares, i);
  if (HAS_NORM && threadIdx.x % 32 == 0) ((float*)(memory + AT_SQUARES))[threadIdx.x / 32] = squares;
}

// --- a step of a warp

struct Step {
  uint4 codes[2];
  float scales[2][SCALES], zeros[2][SCALES], absmax[2];
};

// The weight of a tile, its first row there, and of its columns in y.
struct Place {
  int weight = 0, row, column = 0;
  __device__ Place(const Args& args, int tile) : row(tile * OWN_ROWS) {
    if (IS_GATED) return;
#pragma unroll
    for (int i = 0; i < NUM_WEIGHTS - 1; i++) {
      const int rows = (int)(args.weights[i].rows + ROWS - 1) / ROWS * ROWS;
      if (weight == i && row >= rows) {
        row -= rows;
        column += (int)args.weights[i].rows;
        weight = i + 1;
      }
    }
  }
};

// As it is stored: of a nested scale the code.
__device__ __forceinline__ float read_number(const void* at, i64 i) {
#if IS_NESTED
  return (float)((const u8*)at)[i];
#elif HAS_HALF_SCALES
  return number(((const u16*)at)[i]);
#else
  return ((const float*)at)[i];
#endif
}

// Reads the steps of a warp, one after the other.
struct Reader {
  const Args& args;
  const int g, t, tiles, warp;  // tiles of this block
  int k, turn = 0, weight;
  const u32* codes[2];
  int scales[2];  // of a row the first
  __device__ Reader(const Args& args, int warp, int g, int t, int tiles) : args(args), g(g), t(t), tiles(tiles), warp(warp), k(warp * SHARE) { begin(); }
  __device__ void begin() {
    const Place place(args, blockIdx.x + turn * gridDim.x);
    weight = place.weight;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const Weight& own = args.weights[IS_GATED ? h : weight];
      const i64 row = min((i64)(place.row + g + (IS_GATED ? 0 : 8 * h)), own.rows - 1);  // again behind the end
      codes[h] = own.codes + (IS_TILED ? row / 8 * STEPS * 128 + row % 8 * 16 : row * (K / 8)) + 4 * t;
      scales[h] = row * own.row_stride;
    }
  }
  __device__ void read(Step& step) {
    if (turn >= tiles) return;
    if (k < STEPS) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Weight& own = args.weights[IS_GATED ? h : weight];
        step.codes[h] = read_codes(codes[h] + k * (IS_TILED ? 128 : 16));
        if (2 * t < GROUPS) {
          const int stride = own.group_stride, first = scales[h] + (k * STEP / GROUP + 2 * t) * stride;
#pragma unroll
          for (int i = 0; i < SCALES; i++) {
            step.scales[h][i] = read_number(own.scales, first + i * stride);
            if (HAS_ZEROS) step.zeros[h][i] = read_number(own.zeros, first + i * stride);
          }
          if (IS_NESTED) step.absmax[h] = own.absmax[first / NESTED_GROUP];
        }
      }
    }
    if (++k < (warp + 1) * SHARE) return;
    k = warp * SHARE;
    if (++turn < tiles) begin();
  }
};

// Both values of byte `i`, for the columns of the low and of the high half.
__device__ __forceinline__ u32 pair_of(u32 word, u32 lane4, int i) { return looked_up(__byte_perm(word, lane4, 0x5504 | i << 4)); }

// Adds to the sums of both rows of this lane.
__device__ __forceinline__ void add_step(const Args& args, const Step& step, int weight, int k, int g, int t, float (&totals)[2]) {
  const u32 lane4 = threadIdx.x % 32 * 4;
  const u32 first[4] = {step.codes[0].x, step.codes[0].y, step.codes[0].z, step.codes[0].w};
  const u32 second[4] = {step.codes[1].x, step.codes[1].y, step.codes[1].z, step.codes[1].w};
  float sums[4] = {}, others[4] = {}, inputs[4] = {};  // two chains of sums: one waits for each addition
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const int group = GROUPS == 1 ? 0 : LANE_COLUMNS * (IS_TILED ? w : t) / GROUP;
    const uint4 x = *(const uint4*)(memory + (g == group ? AT_X + 2 * (k * STEP + LANE_COLUMNS * t) : AT_NOTHING) + 16 * w);
    multiply(sums, pair_of(first[w], lane4, 0), pair_of(second[w], lane4, 0), pair_of(first[w], lane4, 1), pair_of(second[w], lane4, 1), x.x, x.y);
    multiply(others, pair_of(first[w], lane4, 2), pair_of(second[w], lane4, 2), pair_of(first[w], lane4, 3), pair_of(second[w], lane4, 3), x.z, x.w);
#if HAS_ZEROS
    const u32 ones = 0x3f803f80;
    multiply(inputs, ones, ones, ones, ones, x.x, x.y);
    multiply(inputs, ones, ones, ones, ones, x.z, x.w);
#endif
  }
  if (2 * t >= GROUPS) return;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
      float scale = step.scales[h][i], sum = sums[2 * h + i] + others[2 * h + i];
      if (IS_NESTED) {
        const float* nested = nested_of(IS_GATED ? h : weight);
        scale = nested[(int)scale] * step.absmax[h] + nested[NESTED_GROUP];
      }
      scale *= args.factor;
      if (HAS_ZEROS && !ADDS_ZEROS) sum -= step.zeros[h][i] * inputs[i];
      totals[h] += scale * sum;
      if (HAS_ZEROS && ADDS_ZEROS) totals[h] += step.zeros[h][i] * inputs[i];
    }
}

// --- a tile of a block

__device__ __forceinline__ float sum_of(const float* sums, int row) {
  float total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += sums[w * ROWS + row];
  return total;
}

// What follows the sums, of a row for each lane of one warp. Rounds where the operations of a model do.
__device__ __forceinline__ void finish(const Args& args, const float* sums, int tile, int lane) {
  const Place place(args, tile);
  const int row = place.row + lane;
  if (lane >= OWN_ROWS || row >= args.weights[place.weight].rows) return;
  float scale = 1.f;
#if HAS_NORM
  float squares = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) squares += ((const float*)(memory + AT_SQUARES))[w];
  scale = rsqrtf(squares / K + args.eps);
#endif
  float result = sum_of(sums, lane) * scale;
  if (HAS_BIAS) result += number(args.weights[place.weight].bias[row]);
  if (ACTIVATION) result = activate(rounded(result));
#if IS_GATED
  float up = sum_of(sums, lane + 8) * scale;
  if (HAS_BIAS) up += number(args.weights[1].bias[row]);
  result = rounded(result) * rounded(up);
#endif
  const int at = place.column + row;
  if (HAS_RESIDUAL) result = number(args.residual[at]) + rounded(result);
  args.y[at] = (u16)pack(result, 0.f);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packed_linear(const __grid_constant__ Args args) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = ((int)args.tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;  // of this block
  check_memory();
  Reader reader(args, warp, g, t, tiles);
  Step steps[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++) reader.read(steps[d]);
  write_tables(args);
  wait_for_x();
  write_inputs(args);
  __syncthreads();
  float totals[2] = {};
  int k = warp * SHARE, turn = 0;
  while (turn < tiles) {
    const int weight = IS_NESTED ? Place(args, blockIdx.x + turn * gridDim.x).weight : 0;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if (SHARE % DEPTH && turn >= tiles) break;
      if (k < STEPS) add_step(args, steps[d], IS_NESTED && SHARE % DEPTH ? Place(args, blockIdx.x + turn * gridDim.x).weight : weight, k, g, t, totals);
      reader.read(steps[d]);
      if (++k < (warp + 1) * SHARE) continue;
      k = warp * SHARE;
      float* sums = (float*)(memory + AT_SUMS) + turn % WARPS * WARPS * ROWS;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        totals[h] += __shfl_xor_sync(~0u, totals[h], 1);
        totals[h] += __shfl_xor_sync(~0u, totals[h], 2);
        if (t == 0) sums[warp * ROWS + g + 8 * h] = totals[h];
        totals[h] = 0;
      }
      const int barrier = 1 + turn % WARPS;
      if (warp == turn % WARPS) {
        wait_for_all(barrier);
        finish(args, sums, blockIdx.x + turn * gridDim.x, lane);
      } else {
        arrive(barrier);
      }
      turn++;
    }
  }
}
