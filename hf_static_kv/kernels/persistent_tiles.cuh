// Linear layers with torchao's tiles of four bits in the kernel of persistent_step.cu: see packed.py.
//
// Eight rows of a weight, a unit, lie together: one copy brings them, or some of their columns, into a stage.
// A warp has the same columns of every unit, spans of eight groups: so their inputs stay in registers.
//
// Tiles lie as the lanes of an mma.m16n8k16 hold them: four words of a lane for 128 columns. Of an mma,
//
//     rows g and g + 8   are row g of a unit, in a column of group i and in the same one of group i + 4
//     column n           has the inputs of group n of the span
//
// So sum [g, i] is of group i, and [g + 8, i + 4] of group i + 4; the others mean nothing. With i from 0 to 3
// lane (g, t) gets the sums of groups 2 t and 2 t + 1 of row g.
//
// The bits of a code c become those of 128 + c in bfloat16, and c - 8 is meant:
//
//     sum of (c - 8) x = sum of (128 + c) x - 136 * sum of x
//
// Tensor cores compute both sums of a group in float32. Numbers some 30 times as large cancel, which takes 5
// bits of its 24; an input has 8.
// The inputs of larger groups are too many for registers: they count as SAME groups of 128 with one scale.
constexpr int GROUP = QUANT_GROUP < 128 ? QUANT_GROUP : 128, SAME = QUANT_GROUP / GROUP;
constexpr int ROWS_OF_UNIT = 8, GROUPS_OF_SPAN = 8, HALF_SPAN = 4 * GROUP;  // columns
constexpr int SPAN_BYTES = ROWS_OF_UNIT * GROUPS_OF_SPAN * GROUP / 2;
constexpr int TILE_COLUMNS = 128, WORD_COLUMNS = 32, STEP_COLUMNS = 16;  // of a tile, a word of a lane, an mma
constexpr int STEPS = GROUP / STEP_COLUMNS;              // of a group
constexpr int WORDS_OF_HALF = HALF_SPAN / WORD_COLUMNS;  // of a lane
constexpr int GROUP_STRIDE = GROUP * 2 + 16;  // bytes between inputs of groups: lanes meet in no bank
constexpr float OFFSET = 128 + 8;
constexpr u32 ONES = 0x3f803f80;  // two bfloat16

constexpr int spans_of(int k) { return (k / GROUP + GROUPS_OF_SPAN - 1) / GROUPS_OF_SPAN; }
static_assert(spans_of(WIDEST) * GROUPS_OF_SPAN * GROUP_STRIDE <= RING_AT, "the host has left less room before the ring");
static_assert(STAGE % SPAN_BYTES == 0, "a stage has whole spans");

template <class P>
struct Units {
  static constexpr int WEIGHTS = P::VR / P::C, N = P::N * P::C / ROWS_OF_UNIT;  // of gate and up each has N
  static constexpr int GROUPS = P::K / GROUP, SPANS = spans_of(P::K), TILES = P::K / TILE_COLUMNS;
  static constexpr int BYTES = P::K * ROWS_OF_UNIT / 2, PARTS = (BYTES + STAGE - 1) / STAGE, SPANS_OF_PART = STAGE / SPAN_BYTES;
  // So many warps share a unit: each has every such span. The other sets of warps have other units.
  static constexpr int WARPS_OF_UNIT = SPANS > 4 ? 8 : SPANS > 2 ? 4 : SPANS, SETS = WARPS / WARPS_OF_UNIT;
  static constexpr int TURNS = (SPANS + WARPS_OF_UNIT - 1) / WARPS_OF_UNIT;
  static_assert(P::C == 4 && P::N % 2 == 0, "a unit is two chunks");
  // A warp does not wait for stages of others. Its next stage is up to SETS * PARTS after the last one. When
  // it waits for that, the stage before in the same slot must be there: else its parity is that of the next.
  static_assert(SLOTS >= SETS * PARTS + FLIGHT_STREAM, "a stage may be taken for one that is not there yet");
  static_assert(P::K % TILE_COLUMNS == 0 && P::K % QUANT_GROUP == 0, "no whole tiles");

  // Row 0 of unit `i` of this block.
  static __device__ Row row_of(const Layer& y, const Share<N>& share, int i) { return P::row_of(y, 2 * (share.first + i / WEIGHTS * BLOCKS), i % WEIGHTS * P::C); }
};

__device__ void write_tables(const Args&) {}
__device__ void fetch_offsets(const Block&, const Layer*) {}

template <class P, class Next>
__device__ void produce_rows(Block& b, const Layer& y, int& turn, u64 policy, Next&& next) {
  using U = Units<P>;
  const Share<U::N> share(b.c, turn);
  for (int i = 0; i < share.count * U::WEIGHTS; i++) {
    const Row own = U::row_of(y, share, i);
    for (int part = 0; part < U::PARTS; part++) {
      const int bytes = min(STAGE, U::BYTES - part * STAGE);
      const int slot = next(bytes);
      if (slot < 0) return;
      const unsigned char* from = own.weight.codes + (u64)own.row / ROWS_OF_UNIT * U::BYTES + part * STAGE;
      copy(shared_memory + RING_AT + slot * STAGE, from, bytes, b.full + slot, policy);
    }
  }
}

// --- scales: [K / G, N] pairs of bfloat16, a scale and a zero

__device__ __forceinline__ const unsigned char* pairs_at(const Row& own, int group) { return own.weight.scales + ((u64)group / SAME * own.rows + own.row) * 4; }

// Of this lane, in each of its spans. Those of the next unit are read while this one is multiplied: to ask L2
// for all of a layer before, as it begins, changed nothing (H200, 2026-11-19).
template <class P>
struct Scales {
  u32 pairs[Units<P>::TURNS][2];
};
template <class P>
__device__ __forceinline__ void read_scales(const Block& b, const Layer& y, const Share<Units<P>::N>& share, int i, Scales<P>& scales) {
  using U = Units<P>;
  const bool is_there = i < share.count * U::WEIGHTS;
  const Row own = U::row_of(y, share, is_there ? i : 0);
  const int first = b.warp % U::WARPS_OF_UNIT * GROUPS_OF_SPAN + b.lane % 4 * 2;
  const u32* from = (const u32*)pairs_at(own, first) + b.lane / 4;  // `first` is even
#pragma unroll
  for (int turn = 0; turn < U::TURNS; turn++)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int group = turn * U::WARPS_OF_UNIT * GROUPS_OF_SPAN + n;
      scales.pairs[turn][n] = is_there && first + group < U::GROUPS ? from[(u64)group / SAME * own.rows] : 0;
    }
}

// --- inputs

template <class P>
struct Inputs {  // of this lane: group g of each of its spans, and the sums of groups 2 t and 2 t + 1
  u32 pairs[Units<P>::TURNS][STEPS][2];
  float sums[Units<P>::TURNS][2];

  __device__ Inputs(const Block& b) {
    using U = Units<P>;
#pragma unroll
    for (int turn = 0; turn < U::TURNS; turn++) {
      const int span = b.warp % U::WARPS_OF_UNIT + turn * U::WARPS_OF_UNIT;
      const bool is_there = U::SPANS % U::WARPS_OF_UNIT == 0 || span < U::SPANS;
      const unsigned char* at = shared_memory + (span * GROUPS_OF_SPAN + b.lane / 4) * GROUP_STRIDE + b.lane % 4 * 4;
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int n = 0; n < 2; n++) pairs[turn][s][n] = is_there ? *(const u32*)(at + (2 * s + n) * STEP_COLUMNS) : 0;
        multiply(sum, ONES, ONES, ONES, ONES, pairs[turn][s][0], pairs[turn][s][1]);
      }
      sums[turn][0] = sum[0], sums[turn][1] = sum[1];
    }
  }
};

// --- products

// 128 + code, of the codes at positions i and i + 4.
__device__ __forceinline__ u32 pair_of(u32 word, int i) { return masked_with<0x000f000f, 0x43004300>(word >> 4 * i); }

// The words of a lane for a span, in both of its halves.
template <class P>
__device__ __forceinline__ void read_codes(const Block& b, const unsigned char* stage, int span, u32 (&words)[2][WORDS_OF_HALF]) {
  using U = Units<P>;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < WORDS_OF_HALF / 4; i++) {
      const int tile = half * (WORDS_OF_HALF / 4) + i;
      uint4 four = make_uint4(0, 0, 0, 0);
      if (U::GROUPS % GROUPS_OF_SPAN == 0 || span * (WORDS_OF_HALF / 2) + tile < U::TILES)
        four = *(const uint4*)(stage + span % U::SPANS_OF_PART * SPAN_BYTES + tile * 512 + b.lane * 16);
      words[half][4 * i] = four.x, words[half][4 * i + 1] = four.y, words[half][4 * i + 2] = four.z, words[half][4 * i + 3] = four.w;
    }
}

// The sums of groups 2 t and 2 t + 1, of 128 + code.
__device__ __forceinline__ float2 products(const Block& b, const u32 (&words)[2][WORDS_OF_HALF], const u32 (&inputs)[STEPS][2]) {
  float sums[4][4];
#pragma unroll
  for (int group = 0; group < 4; group++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[group][i] = 0;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int group = 0; group < 4; group++) {  // four chains: one waits for each addition
      const int column = group * GROUP + s * STEP_COLUMNS, word = column / WORD_COLUMNS, first = column % WORD_COLUMNS / 8;
      multiply(sums[group], pair_of(words[0][word], first), pair_of(words[1][word], first), pair_of(words[0][word], first + 1), pair_of(words[1][word], first + 1), inputs[s][0], inputs[s][1]);
    }
  const bool is_second = b.lane & 2, is_odd = b.lane & 1;  // half of the span; pair of groups in it
  auto picked = [&](int n) { return is_odd ? (is_second ? sums[2 + n][2 + n] : sums[2 + n][n]) : (is_second ? sums[n][2 + n] : sums[n][n]); };
  return {picked(0), picked(1)};
}

// Of each span of a unit: this lane's sums of row g. A stage is free again when its codes are in registers.
template <class P>
__device__ __forceinline__ float multiply_unit(Block& b, const Inputs<P>& inputs, const Scales<P>& scales, u32 stage) {
  using U = Units<P>;
  float sum = 0;
#pragma unroll
  for (int turn = 0; turn < U::TURNS; turn++) {
    const int span = b.warp % U::WARPS_OF_UNIT + turn * U::WARPS_OF_UNIT, part = span / U::SPANS_OF_PART;
    if (U::SPANS % U::WARPS_OF_UNIT && span >= U::SPANS) continue;
    const u32 t = stage + part;
    const int slot = t % SLOTS, next = span + U::WARPS_OF_UNIT;
    b.wait(b.full + slot, (t / SLOTS) & 1);
    u32 words[2][WORDS_OF_HALF];
    read_codes<P>(b, shared_memory + RING_AT + slot * STAGE, span, words);
    __syncwarp();
    // As many arrivals as there are warps: the one with the first span arrives for those without any.
    if (!b.lane && (next >= U::SPANS || next / U::SPANS_OF_PART != part)) {
      const int first = part * U::SPANS_OF_PART, users = min(U::WARPS_OF_UNIT, min(U::SPANS - first, U::SPANS_OF_PART));
      arrive(b.empty + slot, first % U::WARPS_OF_UNIT == b.warp % U::WARPS_OF_UNIT ? WARPS - users + 1 : 1);
    }
    const float2 both = products(b, words, inputs.pairs[turn]);
    const float of_group[2] = {both.x, both.y};
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const u32 pair = scales.pairs[turn][n];
      sum = fmaf(low(pair), fmaf(-OFFSET, inputs.sums[turn][n], of_group[n]), sum);
      sum = fmaf(high(pair), inputs.sums[turn][n], sum);
    }
  }
  return sum;
}

// Row r of all units has `WARPS_OF_UNIT` sums in b.sums[r * WARPS ...].
template <class P>
__device__ void stream_units(Block& b, const Layer& y, const Share<Units<P>::N>& share, Scales<P>& scales, u32& stage) {
  using U = Units<P>;
  const Inputs<P> inputs(b);
  const int units = share.count * U::WEIGHTS;
  for (int i = b.warp / U::WARPS_OF_UNIT; i < units; i += U::SETS) {
    Scales<P> next;
    read_scales<P>(b, y, share, i + U::SETS, next);
    float sum = multiply_unit<P>(b, inputs, scales, stage + i * U::PARTS);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    write_if(b.lane % 4 == 0, b.sums + (i * ROWS_OF_UNIT + b.lane / 4) * WARPS + b.warp % U::WARPS_OF_UNIT, sum);
    scales = next;
  }
  stage += units * U::PARTS;
}

// As `linear` of persistent_step.cu.
template <class P, bool IS_LONG, class Publish>
__device__ __forceinline__ void linear(Block& b, const Layer& y, const uint4* x, int& turn, u32& stage, Publish&& publish_sums) {
  using U = Units<P>;
  const Share<U::N> share(b.c, turn);
  Scales<P> scales;
  read_scales<P>(b, y, share, b.warp / U::WARPS_OF_UNIT, scales);
  constexpr int VECTORS = U::SPANS * GROUPS_OF_SPAN * GROUP / 8;  // with those behind the last group
  unsigned char* first = shared_memory + 8 * b.thread / GROUP * GROUP_STRIDE + 8 * b.thread % GROUP * 2;
#pragma unroll
  for (int v = 0; v < (VECTORS + CONSUMERS - 1) / CONSUMERS; v++) {
    const int at = v * CONSUMERS + b.thread;
    const bool is_there = v < P::VECTORS && at < P::K / 8;
    if (at < VECTORS) *(uint4*)(first + v * (8 * CONSUMERS / GROUP * GROUP_STRIDE)) = is_there ? x[v] : make_uint4(0, 0, 0, 0);
  }
  b.all_consumers();
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_STREAM;
  stream_units<P>(b, y, share, scales, stage);
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_WAIT;
  b.all_consumers();
  if (b.thread < 2 * share.count) {
    const int chunk = b.thread % 2;  // of a unit
    float z[P::VR];
#pragma unroll
    for (int r = 0; r < P::VR; r++) {
      const int row = (b.thread / 2 * U::WEIGHTS + r / P::C) * ROWS_OF_UNIT + chunk * P::C + r % P::C;
      const float* own = b.sums + row * WARPS;
      z[r] = own[0];
#pragma unroll
      for (int w = 1; w < U::WARPS_OF_UNIT; w++) z[r] += own[w];
    }
    publish_sums((share.first + b.thread / 2 * BLOCKS) * ROWS_OF_UNIT + chunk * P::C, z);
  }
  b.swap_sums();
  __syncwarp();
}
