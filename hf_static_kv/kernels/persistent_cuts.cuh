// How persistent_step.cu cuts the weights of each phase into shares of blocks, and these into stages of the ring.

// A weight, and one of its rows.
struct Row {
  Weight weight;
  int row, rows, number;  // this one, all of the weight, and which of the layer's weights it is
};
__device__ __forceinline__ Row row_of_qkv(const Layer& y, int row) {
  if (row < NQ * D) return {y.q, row, NQ * D, 0};
  return row < (NQ + NKV) * D ? Row{y.k, row - NQ * D, NKV * D, 1} : Row{y.v, row - (NQ + NKV) * D, NKV * D, 2};
}

// How a phase is cut: `chunks` of C output rows go to the blocks in turn; a stage holds RS rows of K numbers.
template <int N_, int K_, int C_, int VR_, int RS_>
struct Cut {
  static constexpr int N = N_, K = K_, C = C_, VR = VR_, RS = RS_, VECTORS = vectors(K_);
};
struct CutQKV : Cut<QKV / C_QKV, H, C_QKV, C_QKV, RS_QKV> {
  static __device__ Row row_of(const Layer& y, int chunk, int r) { return row_of_qkv(y, chunk * C + r); }
};
struct CutO : Cut<H / C_O, NQ * D, C_O, C_O, RS_O> {
  static __device__ Row row_of(const Layer& y, int chunk, int r) { return {y.o, chunk * C + r, H, 3}; }
};
struct CutGate : Cut<I / C_GATE, H, C_GATE, 2 * C_GATE, RS_GATE> {
  static __device__ Row row_of(const Layer& y, int chunk, int r) { return {r < C ? y.gate : y.up, chunk * C + r % C, I, r < C ? 4 : 5}; }
};
struct CutDown : Cut<H / C_DOWN, I, C_DOWN, C_DOWN, RS_DOWN> {
  static __device__ Row row_of(const Layer& y, int chunk, int r) { return {y.down, chunk * C + r, H, 6}; }
};
using CutHead = Cut<V / C_HEAD, H, C_HEAD, C_HEAD, RS_HEAD>;
constexpr int HEAD_BLOCK = SUM_ROWS / C_HEAD;  // chunks
// A parity tells two phases of a slot's barrier apart, and no third one.
static_assert(SLOTS >= FLIGHT_STREAM && SLOTS >= FLIGHT_WAIT, "more copies under way than slots");
constexpr int H_VECTORS = vectors(H);

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
