// Linear layers with weights of four bits in the kernel of persistent_step.cu: see packed.py.
//
// A tile has 16 rows (of a gate 8, and 8 of up), and the warps share its columns. In a step a warp multiplies
// [16, 128] on tensor cores:
//
//     lane 4 g + t      of rows g and g + 8 the 16 bytes t: 32 codes
//     table             of a byte both values side by side, once for each lane: no two lanes meet in a bank
//     mma.m16n8k16      wants 4 columns of a lane, and any 4: a sum has no order of columns
//     column n of it    the inputs of group n of the step, and zeros: so each group has a sum of its own
//
// A stage of the ring has up to 16 steps of a tile, its codes and its scales.
//
// IS_TILED: codes lie as a lane reads them (layout "tiles" of packed.py), and each group of a row has a pair of
// bfloat16: a scale, and a zero that is added. So a zero multiplies the sum of the inputs of its group.
constexpr int STEP = 128, LANE_COLUMNS = 32, ROWS = 16, PIECE = 2 * WARPS;  // steps of a stage
constexpr int GROUPS = QUANT_GROUP < STEP ? STEP / QUANT_GROUP : 1;         // of a step
constexpr int SCALES = GROUPS > 1 ? 2 : 1;                                  // that a lane needs in a step
constexpr int SCALE_BYTES = IS_NESTED ? 1 : 4, NESTED_GROUP = 256, HALF_ROWS = 8;
// 64 bytes more than the codes of a row, and 16 more than its scales: lanes of two rows meet in no bank.
constexpr int CODE_STRIDE = PIECE * STEP / 2 + 64, SCALE_STRIDE = PIECE * GROUPS * SCALE_BYTES + 16;
constexpr int SCALES_AT = IS_TILED ? ROWS * PIECE * STEP / 2 : ROWS * CODE_STRIDE;  // in a stage
constexpr int STAGE_BYTES = SCALES_AT + (IS_TILED ? ROWS * PIECE * GROUPS * SCALE_BYTES : ROWS * SCALE_STRIDE);
static_assert(STAGE_BYTES <= STAGE, "a stage has no room for a piece");
static_assert(QUANT_GROUP == 64 || QUANT_GROUP == 32 || (QUANT_GROUP == STEP && IS_TILED), "scales of a step lie together");

template <int ROWS_OF_ALL, int K_, bool IS_GATED_>
struct Tiles {
  static constexpr bool IS_GATED = IS_GATED_;
  static constexpr int K = K_, OWN = IS_GATED ? ROWS / 2 : ROWS, N = ROWS_OF_ALL / OWN, STEPS = K / STEP;
  static constexpr int PIECES = (STEPS + PIECE - 1) / PIECE, OUTPUTS = OWN / 4;  // four at once
  static_assert(ROWS_OF_ALL % OWN == 0 && K % STEP == 0 && (IS_TILED || STEPS * GROUPS * SCALE_BYTES % 16 == 0), "no whole tiles");
};

struct TilesQKV : Tiles<QKV, H, false> {
  static __device__ Row row_of(const Layer& y, int tile, int r) { return row_of_qkv(y, tile * ROWS + r); }
};
struct TilesO : Tiles<H, NQ * D, false> {
  static __device__ Row row_of(const Layer& y, int tile, int r) { return {y.o, tile * ROWS + r, H}; }
};
struct TilesGate : Tiles<I, H, true> {
  static __device__ Row row_of(const Layer& y, int tile, int r) { return {r < OWN ? y.gate : y.up, tile * OWN + r % OWN, I}; }
};
struct TilesDown : Tiles<H, I, false> {
  static __device__ Row row_of(const Layer& y, int tile, int r) { return {y.down, tile * ROWS + r, H}; }
};

// --- shared memory before the ring: the table, then that of nested scales, and the inputs of a phase

constexpr int AT_NESTED = 65536, AT_X = AT_NESTED + NESTED_GROUP * 4, AT_X_SUMS = AT_X + 2 * WIDEST;
static_assert(AT_X_SUMS + (IS_TILED ? WIDEST / QUANT_GROUP * 4 : 0) <= RING_AT, "the host has left less room before the ring");

__device__ void write_tables(const Args& args) {
  check_base();
  for (int i = threadIdx.x; i < 256 * 8; i += CONSUMERS + 32) {
    const int byte = i / 8, first = IS_HIGH_FIRST ? byte >> 4 : byte & 15, second = IS_HIGH_FIRST ? byte & 15 : byte >> 4;
    const u32 both = pack(args.table[first], args.table[second]);
    *(uint4*)(shared_memory + byte * 256 + i % 8 * 16) = make_uint4(both, both, both, both);
  }
  if (IS_NESTED)
    for (int i = threadIdx.x; i < NESTED_GROUP; i += CONSUMERS + 32) ((float*)(shared_memory + AT_NESTED))[i] = args.nested[i];
}

// --- the producer: all lanes of its warp, a row of codes or of scales each

template <class P, class Next>
__device__ void produce_tiles(Block& b, const Layer& y, int& turn, u64 policy, Next&& next) {
  const Share<P::N> share(b.c, turn);
  const int r = IS_TILED ? b.lane % 2 * HALF_ROWS : b.lane % ROWS;
  for (int j = 0; j < share.count; j++) {
    const Row own = P::row_of(y, share.first + j * BLOCKS, r);
    for (int p = 0; p < P::PIECES; p++) {
      const int steps = min(PIECE, P::STEPS - p * PIECE);
      const int slot = next(ROWS * steps * (STEP / 2 + GROUPS * SCALE_BYTES));
      if (slot < 0) return;
      unsigned char* to = shared_memory + RING_AT + slot * STAGE;
      const u64 first = (u64)own.row * P::STEPS + p * PIECE;  // of all steps of the weight
      if (IS_TILED) {  // a lane copies codes or scales of 8 rows
        constexpr int CODES = HALF_ROWS * STEP / 2, PAIRS = HALF_ROWS * 4;
        const u64 block = (u64)own.row / HALF_ROWS * P::STEPS + p * PIECE;
        if (b.lane < 2) copy(to + b.lane * PIECE * CODES, own.weight.codes + block * CODES, steps * CODES, b.full + slot, policy);
        for (int i = b.lane; i < 2 * steps * GROUPS; i += 32)
          copy(to + SCALES_AT + i * PAIRS, own.weight.scales + ((u64)(p * PIECE * GROUPS + i / 2) * own.rows + own.row) * 4, PAIRS, b.full + slot, policy);
      } else if (b.lane < ROWS)
        copy(to + r * CODE_STRIDE, own.weight.codes + first * (STEP / 2), steps * (STEP / 2), b.full + slot, policy);
      else
        copy(to + SCALES_AT + r * SCALE_STRIDE, own.weight.scales + first * (GROUPS * SCALE_BYTES), steps * GROUPS * SCALE_BYTES, b.full + slot, policy);
    }
  }
}

// --- a step of a warp

__device__ __forceinline__ u32 pair_of(u32 word, u32 lane4, int i) { return looked_up(__byte_perm(word, lane4, 0x5504 | i << 4)); }

// Adds step `s` of a stage, step `k` of the rows, to the sums of both rows of this lane.
__device__ __forceinline__ void add_step(const Block& b, const unsigned char* from, int s, int k, const float (&absmax)[2], const float (&offset)[2], float (&totals)[2]) {
  const int g = b.lane / 4, t = b.lane % 4;
  const u32 lane4 = b.lane * 4;
  const unsigned char* codes = from + (IS_TILED ? (s * 32 + b.lane) * 16 : g * CODE_STRIDE + s * (STEP / 2) + 16 * t);
  const uint4 x0 = *(const uint4*)codes;
  const uint4 x8 = *(const uint4*)(codes + HALF_ROWS * (IS_TILED ? PIECE * STEP / 2 : CODE_STRIDE));
  const u32 first[4] = {x0.x, x0.y, x0.z, x0.w}, second[4] = {x8.x, x8.y, x8.z, x8.w};
  const unsigned char* inputs = shared_memory + AT_X + 2 * (k * STEP + LANE_COLUMNS * t);
  float sums[4] = {0, 0, 0, 0}, others[4] = {0, 0, 0, 0};  // two chains: one waits for each addition
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (g == LANE_COLUMNS * (IS_TILED ? w : t) / QUANT_GROUP) x = *(const uint4*)(inputs + 16 * w);
    multiply(sums, pair_of(first[w], lane4, 0), pair_of(second[w], lane4, 0), pair_of(first[w], lane4, 1), pair_of(second[w], lane4, 1), x.x, x.y);
    multiply(others, pair_of(first[w], lane4, 2), pair_of(second[w], lane4, 2), pair_of(first[w], lane4, 3), pair_of(second[w], lane4, 3), x.z, x.w);
  }
  if (2 * t >= GROUPS) return;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
      const int group = s * GROUPS + 2 * t + i;
      const unsigned char* at = from + SCALES_AT + (IS_TILED ? ((2 * group + h) * HALF_ROWS + g) * 4 : (g + 8 * h) * SCALE_STRIDE + group * SCALE_BYTES);
      float scale;
      if (IS_TILED) {
        const u32 pair = *(const u32*)at;
        scale = low(pair);
        totals[h] = fmaf(high(pair), ((const float*)(shared_memory + AT_X_SUMS))[k * GROUPS + 2 * t + i], totals[h]);
      } else
      if (IS_NESTED)
        scale = ((const float*)(shared_memory + AT_NESTED))[*at] * absmax[h] + offset[h];
      else
        scale = *(const float*)at;
      totals[h] = fmaf(scale, sums[2 * h + i] + others[2 * h + i], totals[h]);
    }
}

// The sums of this block's tiles: of tile j, warp w and row r in b.sums[(j * WARPS + w) * ROWS + r].
template <class P>
__device__ void stream_tiles(Block& b, const Layer& y, int first, int count, u32& stage) {
  const int g = b.lane / 4, t = b.lane % 4;
  for (int j = 0; j < count; j++) {
    const Row own[2] = {P::row_of(y, first + j * BLOCKS, g), P::row_of(y, first + j * BLOCKS, g + 8)};
    float totals[2] = {0, 0}, offset[2] = {0, 0};
#pragma unroll
    for (int h = 0; IS_NESTED && h < 2; h++) offset[h] = *own[h].weight.offset;
    for (int p = 0; p < P::PIECES; p++) {
      const int slot = stage % SLOTS;
      const int begin = p * PIECE + 2 * b.warp;  // two steps for each warp
      float absmax[2][2] = {};
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; IS_NESTED && h < 2; h++)
          if (2 * t < GROUPS && begin + i < P::STEPS) absmax[i][h] = own[h].weight.absmax[((u32)own[h].row * P::STEPS + begin + i) * GROUPS / NESTED_GROUP];
      b.wait(b.full + slot, (stage / SLOTS) & 1);
      stage++;
      const unsigned char* from = shared_memory + RING_AT + slot * STAGE;
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (begin + i < P::STEPS) add_step(b, from, 2 * b.warp + i, begin + i, absmax[i], offset, totals);
      __syncwarp();
      if (!b.lane) arrive(b.empty + slot);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      totals[h] += __shfl_xor_sync(~0u, totals[h], 1);
      totals[h] += __shfl_xor_sync(~0u, totals[h], 2);
      if (!t) b.sums[(j * WARPS + b.warp) * ROWS + g + 8 * h] = totals[h];
    }
  }
}

__device__ __forceinline__ float total_of_tile(const Block& b, int j, int row) {
  const float* from = b.sums + j * WARPS * ROWS + row;
  float a = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) a += from[w * ROWS];
  return a;
}

// As `linear` of persistent_step.cu: `publish_sums` takes four rows, and of a gate as many of up.
template <class P, bool IS_LONG, class Publish>
__device__ __forceinline__ void linear(Block& b, const Layer& y, const float* x, int& turn, u32& stage, Publish&& publish_sums) {
  if (!b.group) {
#pragma unroll
    for (int v = 0; v < (P::K / 8 + GROUP - 1) / GROUP; v++) {
      const int at = v * GROUP + b.in_group;
      const float* z = x + 8 * v;
      const u32 pairs[4] = {pack(z[0], z[1]), pack(z[2], z[3]), pack(z[4], z[5]), pack(z[6], z[7])};
      if (!IS_TILED) {
        if (at < P::K / 8) *(uint4*)(shared_memory + AT_X + at * 16) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        continue;
      }
      // Of lane t the word w has the columns 32 w + 2 t + (0, 8, 16, 24, 1, 9, 17, 25).
      const int word = at * 8 % STEP / 32, position = at % 4;
      u16* to = (u16*)(shared_memory + AT_X) + at * 8 / STEP * STEP + 8 * word + position;
      float sum = 0;
#pragma unroll
      for (int t = 0; t < 4; t++) {
        if (at < P::K / 8) to[LANE_COLUMNS * t] = (u16)pairs[t], to[LANE_COLUMNS * t + 4] = (u16)(pairs[t] >> 16);
        sum += low(pairs[t]) + high(pairs[t]);
      }
#pragma unroll
      for (int o = 1; o < QUANT_GROUP / 8; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
      if (at < P::K / 8 && at % (QUANT_GROUP / 8) == 0) ((float*)(shared_memory + AT_X_SUMS))[at * 8 / QUANT_GROUP] = sum;
    }
  }
  b.all_consumers();
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_STREAM;
  const Share<P::N> share(b.c, turn);
  stream_tiles<P>(b, y, share.first, share.count, stage);
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_WAIT;
  b.all_consumers();
  if (b.thread < share.count * P::OUTPUTS) {
    const int j = b.thread / P::OUTPUTS, row = 4 * (b.thread % P::OUTPUTS);
    float z[8];
#pragma unroll
    for (int r = 0; r < 4; r++) z[r] = total_of_tile(b, j, row + r);
#pragma unroll
    for (int r = 0; P::IS_GATED && r < 4; r++) z[4 + r] = total_of_tile(b, j, P::OWN + row + r);
    publish_sums((share.first + j * BLOCKS) * P::OWN + row, z);
  }
  __syncwarp();
}
