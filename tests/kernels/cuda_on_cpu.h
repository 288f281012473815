// Runs a kernel on a CPU: a thread of the machine for each thread of a block, one block after the other.
#include <pthread.h>

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>
#define EMULATED
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define SHARED_MEMORY 262144

struct uint4 {
  unsigned x, y, z, w;
};
struct Dim {
  unsigned x;
};
static thread_local Dim threadIdx, blockIdx;
static Dim gridDim, blockDim;
alignas(256) unsigned char memory[SHARED_MEMORY];
static pthread_barrier_t block_barrier, warp_barriers[32];
static float warp_floats[32][32];
static unsigned warp_words[32][32][6];

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float __uint_as_float(unsigned x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static unsigned __float_as_uint(float x) {
  unsigned y;
  memcpy(&y, &x, 4);
  return y;
}
#define __expf expf
static float rsqrtf(float x) { return 1 / sqrtf(x); }
template <class A, class B>
static A min(A a, B b) {
  return a < (A)b ? a : (A)b;
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned x = 0;
  for (int i = 0; i < 4; i++) x |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return x;
}
static void wait(pthread_barrier_t* barrier) { pthread_barrier_wait(barrier); }
static void __syncthreads() { wait(&block_barrier); }
static float __shfl_xor_sync(unsigned, float x, int by) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  warp_floats[warp][lane] = x;
  wait(warp_barriers + warp);
  const float y = warp_floats[warp][lane ^ by];
  wait(warp_barriers + warp);
  return y;
}
static unsigned pack(float low, float high) {  // to bfloat16, to the nearest, ties to even
  auto half = [](float x) {
    const unsigned bits = __float_as_uint(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return half(low) | half(high) << 16;
}
// mma.m16n8k16, as the PTX manual places its fragments.
static void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp_words[warp][lane], own, sizeof own);
  wait(warp_barriers + warp);
  auto half = [&](int from, int word, int upper) { return __uint_as_float(upper ? warp_words[warp][from][word] & 0xffff0000u : warp_words[warp][from][word] << 16); };
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      const int column = 2 * t + i % 2;
      const float a = half(4 * g + k % 8 / 2, i / 2 + 2 * (k / 8), k % 2), b = half(4 * column + k % 8 / 2, 4 + k / 8, k % 2);
      sum[i] += a * b;
    }
  wait(warp_barriers + warp);
}
static uint4 read_codes(const unsigned* at) { return {at[0], at[1], at[2], at[3]}; }
static unsigned looked_up(unsigned at) {
  unsigned x;
  memcpy(&x, memory + at, 4);
  return x;
}
// Barriers that some threads wait for and others do not.
struct Barrier {
  std::mutex mutex;
  std::condition_variable all_there;
  int count = 0, generation = 0;
  void arrive(int threads, bool waits) {
    std::unique_lock<std::mutex> lock(mutex);
    const int own = generation;
    if (++count == threads) {
      count = 0;
      generation++;
      all_there.notify_all();
    } else if (waits) {
      all_there.wait(lock, [&] { return generation != own; });
    }
  }
};
static Barrier barriers[16];
static void arrive(int barrier) { barriers[barrier].arrive(blockDim.x, false); }
static void wait_for_all(int barrier) { barriers[barrier].arrive(blockDim.x, true); }
static void wait_for_x() {}
static void check_memory() {}

template <class Kernel>
static void launch(Kernel kernel, int blocks, int threads) {
  pthread_barrier_init(&block_barrier, nullptr, threads);
  for (int w = 0; w < threads / 32; w++) pthread_barrier_init(warp_barriers + w, nullptr, 32);
  gridDim.x = blocks;
  blockDim.x = threads;
  for (int b = 0; b < blocks; b++) {
    memset(memory, 0xff, sizeof memory);  // not a number
    std::vector<std::thread> all;
    for (int i = 0; i < threads; i++)
      all.emplace_back([=] {
        blockIdx.x = b;
        threadIdx.x = i;
        kernel();
      });
    for (auto& one : all) one.join();
  }
}
