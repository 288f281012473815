// Attention in the kernel of persistent_step.cu: each block has splits of the keys of a head, and some
// blocks put the splits of a head together.

// A quarter, half or whole warp has a token of a head. Warps share out head groups, then tokens.
constexpr int PER_TOKEN = D / 8, HEADS_AT_ONCE = 32 / PER_TOKEN;
constexpr int head_groups(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : 8; }
constexpr int HEAD_GROUPS = head_groups((UNIT_HEADS + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE), SLICES = WARPS / HEAD_GROUPS;
constexpr int UNITS = NQ / UNIT_HEADS, UNITS_PER_KV = HEADS_PER_KV / UNIT_HEADS;
constexpr int ROUNDS = 8, TILE = ROUNDS * SLICES;
constexpr int PAIRS = D / 64;  // of elements that a lane has of a head
constexpr float NOTHING = -1e30f;  // less than any score

// Read before the layer waits for values, and used behind the wait.
struct Place {
  i64 first, end, slot;  // attended slots [first, end), and that of the new token
  __device__ Place(const Layer& y) : first(y.span[1]), end(y.span[2]), slot(y.slot[0]) {}
};
struct Splits {
  int length, size, count;
  __device__ Splits(const Place& place) {
    length = (int)(place.end - place.first);
    size = ((length + SPLITS - 1) / SPLITS + TILE - 1) / TILE * TILE;
    count = (length + size - 1) / size;
  }
};

// A head [D] of the published words, normalized and rotated: elements 2 (lane + 32 j), and the next.
__device__ void load_head(Block& b, const unsigned char* words, const u16* norm, const u16* angles, float (&e)[2 * PAIRS]) {
  u32 cosines[PAIRS], sines[PAIRS];  // asked for before the words are there
#if HAS_QK_NORM
  u32 weights[PAIRS];
#endif
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    const int at = 2 * (b.lane + 32 * j);
    cosines[j] = angles ? *(const u32*)(angles + at) : 0, sines[j] = angles ? *(const u32*)(angles + D + at) : 0;
#if HAS_QK_NORM
    weights[j] = norm ? *(const u32*)(norm + at) : 0;
#endif
  }
  u32 x[PAIRS], spins = 0;
  bool all;
  do {
    all = true;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) x[j] = look4(words + (b.lane + 32 * j) * 4);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) all &= is_low(x[j]) & is_high(x[j]);
  } while (!all && b.waits(spins));
  __syncwarp();
#pragma unroll
  for (int j = 0; j < PAIRS; j++) e[2 * j] = low(x[j]), e[2 * j + 1] = high(x[j]);
#if HAS_QK_NORM
  if (norm) {
    float a = 0;
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; j++) a = fmaf(e[j], e[j], a);
    const float factor = rsqrtf(warp_sum(a) / D + QK_EPS);
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; j++) e[j] = weighted(e[j] * factor, (u16)(weights[j / 2] >> 16 * (j % 2)));
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
    const float cosine = j % 2 ? high(cosines[j / 2]) : low(cosines[j / 2]), sine = j % 2 ? high(sines[j / 2]) : low(sines[j / 2]);
    turned[j] = rounded(rounded(e[j] * cosine) + rounded(sign * other * sine));
  }
#pragma unroll
  for (int j = 0; j < 2 * PAIRS; j++) e[j] = turned[j];
}

__device__ void attend(Block& b, const Layer& y, unsigned char* words, const Place& place, const Splits& splits, i64 position) {
  const int part = b.lane % PER_TOKEN * 8, slice = b.warp / HEAD_GROUPS;
  const int own = b.warp % HEAD_GROUPS * HEADS_AT_ONCE + b.lane / PER_TOKEN;  // head of the unit
  float* queries = b.scratch;                          // [G, D]
  float* key = queries + UNIT_HEADS * D;             // [D], of the new token
  float* value = key + D;
  float* merged = value + D;                           // [SLICES, G, D + 2]
  for (int u = b.c; u < UNITS * splits.count; u += BLOCKS) {
    const int unit = u % UNITS, split = u / UNITS, head = unit / UNITS_PER_KV;
    const bool has_new = split == splits.count - 1;
    const int begin = split * splits.size;
    const int known = has_new ? splits.length - begin - 1 : splits.size;
    const i64 at = head * y.head_stride + (place.first + begin) * D + part;
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
    const u16* angles = y.table ? y.table + position * 2 * D : 0;
    for (int task = b.warp; task < UNIT_HEADS + 2; task += WARPS) {
      const bool is_query = task < UNIT_HEADS, is_key = task == UNIT_HEADS;
      if (!is_query && !has_new) continue;
      const int row = is_query ? unit * UNIT_HEADS + task : is_key ? NQ + head : NQ + NKV + head;
      float e[2 * PAIRS];
      load_head(b, words + AT_QKV + row * D * 2, is_query ? y.q_norm : is_key ? y.k_norm : 0, is_query || is_key ? angles : 0, e);
      float* to = is_query ? queries + task * D : is_key ? key : value;
      u16* store = (is_key ? y.keys : y.values) + head * y.head_stride + place.slot * D;
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int at = 2 * (b.lane + 32 * j);
        const float by = is_query ? SCALE * 1.4426950408889634f : 1.f;
        to[at] = e[2 * j] * by;
        to[at + 1] = e[2 * j + 1] * by;
        if (!is_query && unit % UNITS_PER_KV == 0) *(u32*)(store + at) = pack(e[2 * j], e[2 * j + 1]);
      }
    }
    b.all_consumers();
    float top = NOTHING, sum = 0, acc[8], q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) acc[i] = 0, q[i] = queries[min(own, UNIT_HEADS - 1) * D + part + i];
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
    if (own < UNIT_HEADS) {
      float* to = merged + (slice * UNIT_HEADS + own) * (D + 2);
#pragma unroll
      for (int i = 0; i < 8; i++) to[part + i] = acc[i];
      if (!part) to[D] = top, to[D + 1] = sum;
    }
    b.all_consumers();
    for (int e = b.thread; e < UNIT_HEADS * D; e += CONSUMERS) {
      const int g = e / D, d = e % D;
      const float* from = merged + g * (D + 2);
      float most = NOTHING, a = 0, s = 0;
#pragma unroll
      for (int w = 0; w < SLICES; w++) most = fmaxf(most, from[w * UNIT_HEADS * (D + 2) + D]);
#pragma unroll
      for (int w = 0; w < SLICES; w++) {
        const float* it = from + w * UNIT_HEADS * (D + 2);
        const float by = exp2f(it[D] - most);
        a = fmaf(by, it[d], a);
        s = fmaf(by, it[D + 1], s);
      }
      unsigned char* to = words + AT_PARTS + ((unit * UNIT_HEADS + g) * SPLITS + split) * PART * 4;
      tell4(to + d * 4, __float_as_uint(a));
      if (!d) tell8(to + D * 4, __float_as_uint(most), __float_as_uint(s));
    }
    b.all_consumers();
  }
}

// The partial attentions of one head, together.
__device__ void combine(Block& b, unsigned char* words, const Splits& splits) {
  constexpr int PARTS = CONSUMERS / D, AT_ONCE = PARTS < 4 ? 8 : 4;
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
