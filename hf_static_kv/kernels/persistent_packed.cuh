// Linear layers with weights of four or eight bits in the kernel of persistent_step.cu: see packed.py.
//
// A warp multiplies on tensor cores. An mma wants some columns of a lane, and any: a sum has no order of
// columns. Of four bits a table gives both values of a byte side by side, once for each lane: no two lanes meet
// in a bank. The inputs lie in the other half of its lines. Codes of eight bits are multiplied as they are; of
// an input x then there are 16 bits, with one scale for each 64 inputs: x = scale * (256 * high + low).
//
// A stage has some rows, whole, in one copy for each run of them that lies together: copies of a few bytes
// take as long as those of many. Of an mma,
//
//     rows g and g + 8   are of weight rows 2 p and 2 p + 1 the columns of group 8 i + (g ^ 2 q)
//     column n           has the inputs of group 8 i + n
//
// So sum [g, n] with n = g ^ 2 q is of row 2 p and group 8 i + n, and [g + 8, n] of row 2 p + 1: both are in
// lane (g, t) with t = g / 2 ^ q. A warp counts its products by q: each lane has one of every four. Of a row
// that ends within a span some codes behind it are read: they meet inputs of zero.
constexpr float LARGEST_INPUT = 127 * 256;
constexpr int LINE = 256, HALF_LINE = 128;  // bytes of the table: a line for each byte
constexpr int NESTED_GROUP = 256, NUM_WEIGHTS = 7;
constexpr int AT_NESTED = 256 * LINE, AT_OFFSETS = AT_NESTED + NESTED_GROUP * 4;
constexpr int AT_INPUT_SCALES = (WIDEST + 511) / 512 * 1024;  // behind the inputs of whole spans, of eight bits
static_assert(IS_BYTES || WIDEST * 2 <= 256 * HALF_LINE, "the inputs have no room beside the table");
static_assert((IS_BYTES ? AT_INPUT_SCALES + AT_INPUT_SCALES / 32 : AT_OFFSETS + 32) <= RING_AT, "the host has left less room before the ring");

__device__ void write_tables(const Args& args) {
  if (IS_BYTES) return;
  check_base();
  for (int i = threadIdx.x; i < 256 * 8; i += CONSUMERS + 32) {
    const int byte = i / 8, first = IS_HIGH_FIRST ? byte >> 4 : byte & 15, second = IS_HIGH_FIRST ? byte & 15 : byte >> 4;
    const u32 both = pack(args.table[first], args.table[second]);
    *(uint4*)(shared_memory + byte * LINE + i % 8 * 16) = make_uint4(both, both, both, both);
  }
  if (IS_NESTED)
    for (int i = threadIdx.x; i < NESTED_GROUP; i += CONSUMERS + 32) ((float*)(shared_memory + AT_NESTED))[i] = args.nested[i];
}
// The offsets of a layer's scales: read here, and waited for with what the layer begins with.
__device__ void fetch_offsets(const Block& b, const Layer* y) {
  if (IS_NESTED && b.thread < NUM_WEIGHTS) ((float*)(shared_memory + AT_OFFSETS))[b.thread] = *(&y->q)[b.thread].offset;
}
__device__ __forceinline__ unsigned char* inputs_at(int vector) { return shared_memory + (IS_BYTES ? vector * 16 : vector / 8 * LINE + HALF_LINE + vector % 8 * 16); }
#if IS_BYTES
using Codes = uint4;  // 16 of them
__device__ __forceinline__ float scale_of_inputs(int group) { return ((const float*)(shared_memory + AT_INPUT_SCALES))[group]; }
// Eight inputs as high and low bytes, and the scale of 64 of them, which eight lanes have. Of infinity and NaN
// the scale is one of them.
__device__ __forceinline__ void write_inputs(int vector, uint4 x) {
  const u32 pairs[4] = {x.x, x.y, x.z, x.w};
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) largest = max(largest, max(pairs[i] << 16 & 0x7fffffffu, pairs[i] & 0x7fff0000u));
#pragma unroll
  for (int o = 1; o < 8; o *= 2) largest = max(largest, (u32)__shfl_xor_sync(~0u, (int)largest, o));
  const float most = __uint_as_float(largest), inverse = largest ? LARGEST_INPUT / most : 0;
  u32 bytes[2][2] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int both = __float2int_rn((i % 2 ? high(pairs[i / 2]) : low(pairs[i / 2])) * inverse) + 128;  // -128 to 127, and from 0 on
    bytes[0][i / 4] |= (both >> 8 & 255) << 8 * (i % 4);
    bytes[1][i / 4] |= ((both & 255) ^ 128) << 8 * (i % 4);
  }
  unsigned char* to = shared_memory + vector / 64 * 1024 + vector % 64 * 8;
  *(uint2*)to = make_uint2(bytes[0][0], bytes[0][1]), *(uint2*)(to + 512) = make_uint2(bytes[1][0], bytes[1][1]);
  if (vector % 8 == 0) ((float*)(shared_memory + AT_INPUT_SCALES))[vector / 8] = most / LARGEST_INPUT;
}
#else
using Codes = uint2;
// The values 2 i and 2 i + 1 of 16 codes, as bfloat16.
__device__ __forceinline__ u32 pair_of(const Codes& codes, u32 lane4, int i) { return looked_up(__byte_perm(i < 4 ? codes.x : codes.y, lane4, 0x5504 | i % 4 << 4)); }
__device__ __forceinline__ void write_inputs(int vector, uint4 x) { *(uint4*)inputs_at(vector / 64 * 64 + vector % 2 * 32 + vector % 64 / 2) = x; }  // of every 64 the even ones, then the odd ones
#endif

// --- how the warps share the rows and columns of a stage

constexpr int SCALE_BYTES = IS_BYTES ? 0 : IS_NESTED ? 1 : 4, CODES = sizeof(Codes), SPAN = 8 * QUANT_GROUP;
static_assert(QUANT_GROUP == 64, "a lane has a quarter of a group");

// `WARPS_OF_PAIR` warps have the columns of a pair of rows.
template <class P>
struct Parts {
  // Stages that are multiplied at once: of few rows the warps would have unequal parts, and few of them.
  static constexpr int WANTED = P::RS < ROWS_AT_ONCE ? ROWS_AT_ONCE / P::RS : 1, STAGES = WANTED <= SLOTS ? WANTED : 2;
  static_assert(STAGES <= SLOTS, "a warp waits for stages that have no slot");
  static constexpr int GROUPS = P::K / QUANT_GROUP, SPANS = (GROUPS + 7) / 8, PAIRS = STAGES * P::RS / 2;
  static constexpr int turns(int warps) { return (SPANS + warps - 1) / warps * ((PAIRS * warps + WARPS - 1) / WARPS); }
  static constexpr int of(int warps) { return PAIRS * warps <= 4 * WARPS && (warps == 1 || turns(warps) <= turns(warps / 2)) ? warps : of(warps / 2); }
  static constexpr int WARPS_OF_PAIR = of(WARPS), PAIRS_AT_ONCE = WARPS / WARPS_OF_PAIR;
  static constexpr int OWN_PAIRS = (PAIRS + PAIRS_AT_ONCE - 1) / PAIRS_AT_ONCE;
  static constexpr int TURNS = (SPANS + WARPS_OF_PAIR - 1) / WARPS_OF_PAIR, PRODUCTS = TURNS * OWN_PAIRS, OF_LANE = (PRODUCTS + 3) / 4;
  static_assert(OWN_PAIRS == 1 || OWN_PAIRS == 2 || OWN_PAIRS == 4, "a lane has products of several pairs");
  // A stage: codes, scales, and for each run the absmax that its nested scales need.
  static constexpr int RUN = P::RS < P::C ? P::RS : P::C, ROW = P::K * CODES / 16, RUN_CODES = RUN * ROW, RUN_SCALES = RUN * GROUPS * SCALE_BYTES;
  static constexpr int OUTER = IS_NESTED ? ((RUN * GROUPS + NESTED_GROUP - 1) / NESTED_GROUP + (NESTED_GROUP % (RUN * GROUPS) != 0) + 3 + 3) / 4 * 4 : 0;
  static constexpr int SCALES_AT = P::RS * ROW, OUTER_AT = SCALES_AT + P::RS / RUN * RUN_SCALES;
  static constexpr int RUN_BYTES = RUN_CODES + RUN_SCALES + OUTER * 4;
  static_assert(P::RS % 2 == 0 && RUN % 2 == 0 && P::K % QUANT_GROUP == 0 && RUN_SCALES % 16 == 0, "no whole pairs of rows");
  static_assert(P::RS / RUN * RUN_BYTES <= STAGE, "a stage has no room for its rows");

  // The first absmax that a run copies: four lie together.
  static __device__ __forceinline__ u32 first_outer(const Row& own) { return min((u32)own.row * GROUPS / NESTED_GROUP & ~3u, (u32)own.rows * GROUPS / NESTED_GROUP - OUTER); }
};

template <class P, class Next>
__device__ void produce_rows(Block& b, const Layer& y, int& turn, u64 policy, Next&& next) {
  using Q = Parts<P>;
  const Share<P::N> share(b.c, turn);
  for (int row = 0; row < share.count * P::VR; row += P::RS) {
    const int runs = min(P::RS, share.count * P::VR - row) / Q::RUN;
    const int slot = next(runs * Q::RUN_BYTES);
    if (slot < 0) return;
    unsigned char* to = shared_memory + RING_AT + slot * STAGE;
    for (int i = 0; i < runs; i++) {
      const int r = row + i * Q::RUN;
      const Row own = P::row_of(y, share.first + r / P::VR * BLOCKS, r % P::VR);
      copy(to + i * Q::RUN_CODES, own.weight.codes + (u64)own.row * Q::ROW, Q::RUN_CODES, b.full + slot, policy);
      if (!IS_BYTES) copy(to + Q::SCALES_AT + i * Q::RUN_SCALES, own.weight.scales + (u64)own.row * (Q::GROUPS * SCALE_BYTES), Q::RUN_SCALES, b.full + slot, policy);
      if (IS_NESTED) copy(to + Q::OUTER_AT + i * Q::OUTER * 4, own.weight.absmax + Q::first_outer(own), Q::OUTER * 4, b.full + slot, policy);
    }
  }
}

// The scale of a group of row r + h of a stage; row r of it is `own`, and r is even. Of eight bits that of the inputs.
template <class P>
__device__ __forceinline__ float scale_of_group(const unsigned char* stage, const Row& own, int r, int h, int group) {
#if IS_BYTES
  return scale_of_inputs(group);
#else
  using Q = Parts<P>;
  const unsigned char* at = stage + Q::SCALES_AT + ((r + h) * Q::GROUPS + group) * SCALE_BYTES;
  if (!IS_NESTED) return *(const float*)at;
  Row first = own;
  first.row -= r % Q::RUN;
  u32 outer = (u32)((own.row + h) * Q::GROUPS + group) / NESTED_GROUP - Q::first_outer(first);
  outer = min(outer, (u32)Q::OUTER - 1);  // of a row beyond the last one nothing is used
  const float absmax = ((const float*)(stage + Q::OUTER_AT))[r / Q::RUN * Q::OUTER + outer];
  return ((const float*)(shared_memory + AT_NESTED))[*at] * absmax + ((const float*)(shared_memory + AT_OFFSETS))[own.number];
#endif
}

// The products of a pair of rows with the inputs of a span. Those of other lanes mean nothing.
__device__ __forceinline__ float2 product(const Block& b, const Codes& first, const Codes& second, uint4 x, uint4 z) {
  const bool is_odd = b.lane & 4;
#if IS_BYTES
  int a[4] = {0, 0, 0, 0}, c[4] = {0, 0, 0, 0};
  multiply(a, first.x, second.x, first.y, second.y, x.x, x.y);
  multiply(c, first.x, second.x, first.y, second.y, z.x, z.y);
  multiply(a, first.z, second.z, first.w, second.w, x.z, x.w);
  multiply(c, first.z, second.z, first.w, second.w, z.z, z.w);
  auto both = [&](int i) { return (float)(256 * a[i] + c[i]); };  // below 2 ** 29
  return {is_odd ? both(1) : both(0), is_odd ? both(3) : both(2)};
#else
  const u32 lane4 = b.lane * 4;
  auto add = [&](float (&sum)[4], int i, u32 low, u32 high) { multiply(sum, pair_of(first, lane4, i), pair_of(second, lane4, i), pair_of(first, lane4, i + 1), pair_of(second, lane4, i + 1), low, high); };
  float a[4] = {0, 0, 0, 0}, c[4] = {0, 0, 0, 0};  // two chains: one waits for each addition
  add(a, 0, x.x, x.y);
  add(c, 2, x.z, x.w);
  add(a, 4, z.x, z.y);
  add(c, 6, z.z, z.w);
  return {is_odd ? a[1] + c[1] : a[0] + c[0], is_odd ? a[3] + c[3] : a[2] + c[2]};
#endif
}

// What a lane has of a stage: products of pair (t ^ g / 2) % OWN_PAIRS of this warp's, and their scales.
template <class P>
struct Found {
  float2 products[Parts<P>::OF_LANE], scales[Parts<P>::OF_LANE];
};

// Over the lanes that have sums of one pair.
template <int PAIRS>
__device__ __forceinline__ float sum_of_pair(float a) {
  a += __shfl_xor_sync(~0u, a, 4);
  a += __shfl_xor_sync(~0u, a, 8 | 1);
  a += __shfl_xor_sync(~0u, a, 16 | 2);
  if (PAIRS < 4) a += __shfl_xor_sync(~0u, a, 2);
  if (PAIRS < 2) a += __shfl_xor_sync(~0u, a, 1);
  return a;
}

// The sums of a stage's rows: of row r of all, as many as `WARPS_OF_PAIR`, in b.sums[r * WARPS ...].
template <class P>
__device__ __forceinline__ void add_up(const Block& b, int row, const Found<P>& found) {
  using Q = Parts<P>;
  float first = 0, second = 0;
#pragma unroll
  for (int i = 0; i < Q::OF_LANE; i++) first = fmaf(found.scales[i].x, found.products[i].x, first), second = fmaf(found.scales[i].y, found.products[i].y, second);
  first = sum_of_pair<Q::OWN_PAIRS>(first), second = sum_of_pair<Q::OWN_PAIRS>(second);
  const int pair = b.warp / Q::WARPS_OF_PAIR + b.lane * Q::PAIRS_AT_ONCE;
  float* to = b.sums + (row + 2 * pair) * WARPS + b.warp % Q::WARPS_OF_PAIR;
  const bool has_sums = b.lane < Q::OWN_PAIRS && pair < Q::PAIRS;
  // No branch, which would keep lookups behind the sums.
  write_if(has_sums, to, first), write_if(has_sums, to + WARPS, second);
}

// Of `stages` stages, the first of which begins with this row. Their slots are free again before the codes
// are looked up, and meanwhile the rows before are added up.
template <class P>
__device__ __forceinline__ void multiply_pairs(Block& b, const Layer& y, const Share<P::N>& share, int row, u32 stage, int stages, Found<P>& found) {
  using Q = Parts<P>;
  const int slot = stage % SLOTS;
  auto slot_of = [&](int i) { return slot + i >= SLOTS ? slot + i - SLOTS : slot + i; };
  auto stage_of = [&](int pair) { return shared_memory + RING_AT + slot_of(pair / (P::RS / 2)) * STAGE; };
  const int g = b.lane / 4, t = b.lane % 4, span = b.warp % Q::WARPS_OF_PAIR, first_pair = b.warp / Q::WARPS_OF_PAIR, mine = t ^ g / 2;
  auto is_there = [&](int q) {  // else it is beyond the stage
    return (Q::PRODUCTS % 4 == 0 || q < Q::PRODUCTS) && (Q::SPANS % Q::WARPS_OF_PAIR == 0 || span + q / Q::OWN_PAIRS * Q::WARPS_OF_PAIR < Q::SPANS) && (Q::PAIRS % Q::PAIRS_AT_ONCE == 0 || first_pair + q % Q::OWN_PAIRS * Q::PAIRS_AT_ONCE < Q::PAIRS);
  };
  Codes codes[Q::PRODUCTS][2];
#pragma unroll
  for (int q = 0; q < Q::PRODUCTS; q++) {
    if (!is_there(q)) continue;
    const int pair = first_pair + q % Q::OWN_PAIRS * Q::PAIRS_AT_ONCE, of_span = span + q / Q::OWN_PAIRS * Q::WARPS_OF_PAIR;
    const unsigned char* at = stage_of(pair) + 2 * (pair % (P::RS / 2)) * Q::ROW + of_span * (SPAN * CODES / 16) + (b.lane ^ 8 * (q % 4)) * CODES;
    codes[q][0] = *(const Codes*)at, codes[q][1] = *(const Codes*)(at + Q::ROW);
  }
  const int r = 2 * (first_pair + mine % Q::OWN_PAIRS * Q::PAIRS_AT_ONCE), of_all = row + r;
  const Row own = P::row_of(y, share.first + of_all / P::VR * BLOCKS, of_all % P::VR);
  float2 scales[Q::OF_LANE];
#pragma unroll
  for (int i = 0; i < Q::OF_LANE; i++) {
    const int q = 4 * i + mine, group = 8 * (span + q / Q::OWN_PAIRS * Q::WARPS_OF_PAIR) + 2 * t + g % 2;
    scales[i] = {0, 0};
    if (is_there(q) && (Q::GROUPS % 8 == 0 || group < Q::GROUPS)) scales[i] = {scale_of_group<P>(stage_of(r / 2), own, r % P::RS, 0, group), scale_of_group<P>(stage_of(r / 2), own, r % P::RS, 1, group)};
  }
  __syncwarp();
  if (!b.lane)
    for (int i = 0; i < stages; i++) arrive(b.empty + slot_of(i));
  add_up<P>(b, row ? row - Q::STAGES * P::RS : 0, found);
#pragma unroll
  for (int i = 0; i < Q::OF_LANE; i++) found.scales[i] = scales[i], found.products[i] = {0, 0};
  uint4 x, z;
#pragma unroll
  for (int q = 0; q < Q::PRODUCTS; q++) {
    if (!is_there(q)) continue;
    const int vector = 64 * (span + q / Q::OWN_PAIRS * Q::WARPS_OF_PAIR) + b.lane;
    if (q % Q::OWN_PAIRS == 0) x = *(const uint4*)inputs_at(vector), z = *(const uint4*)inputs_at(vector + 32);
    const float2 both = product(b, codes[q][0], codes[q][1], x, z);
    if (q % 4 == mine) found.products[q / 4] = both;
  }
}

template <class P>
__device__ void stream_rows(Block& b, const Layer& y, const Share<P::N>& share, u32& stage) {
  const int rows = share.count * P::VR;
  constexpr int AT_ONCE = Parts<P>::STAGES * P::RS;
  Found<P> found = {};
  for (int row = 0; row < rows; row += AT_ONCE) {
    const int stages = min(Parts<P>::STAGES, (rows - row + P::RS - 1) / P::RS);
    for (int i = 0; i < stages; i++) b.wait(b.full + (stage + i) % SLOTS, ((stage + i) / SLOTS) & 1);
    multiply_pairs<P>(b, y, share, row, stage, stages, found);
    stage += stages;
  }
  add_up<P>(b, rows ? (rows - 1) / AT_ONCE * AT_ONCE : 0, found);
}

#if IS_BYTES
__device__ __forceinline__ float scale_of_row(const Row& own) {
#if HAS_HALF_SCALES
  return half_of(((const u16*)own.weight.scales)[own.row]) * SCALE_FACTOR;
#else
  return ((const float*)own.weight.scales)[own.row] * SCALE_FACTOR;
#endif
}
#endif

// As `linear` of persistent_step.cu.
template <class P, bool IS_LONG, class Publish>
__device__ __forceinline__ void linear(Block& b, const Layer& y, const uint4* x, int& turn, u32& stage, Publish&& publish_sums) {
  using Q = Parts<P>;
#pragma unroll
  for (int v = 0; v < (Q::SPANS * 64 + CONSUMERS - 1) / CONSUMERS; v++) {
    const int at = v * CONSUMERS + b.thread;
    const bool is_there = v < P::VECTORS && at < P::K / 8;
    if (at < Q::SPANS * 64) write_inputs(at, is_there ? x[v] : make_uint4(0, 0, 0, 0));
  }
  b.all_consumers();
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_STREAM;
  const Share<P::N> share(b.c, turn);
  stream_rows<P>(b, y, share, stage);
  if (IS_LONG && !b.thread) *b.flight = FLIGHT_WAIT;
  b.all_consumers();
  if (b.thread < share.count) {
    float z[P::VR];
#pragma unroll
    for (int r = 0; r < P::VR; r++) {
      const float* own = b.sums + (b.thread * P::VR + r) * WARPS;
      z[r] = own[0];
#pragma unroll
      for (int w = 1; w < Q::WARPS_OF_PAIR; w++) z[r] += own[w];
#if IS_BYTES
      z[r] *= scale_of_row(P::row_of(y, share.first + b.thread * BLOCKS, r));
#endif
    }
    publish_sums((share.first + b.thread * BLOCKS) * P::C, z);
  }
  b.swap_sums();
  __syncwarp();
}
