// In the place of hopper.cuh: a kernel whose blocks all run at once, on a CPU.
//
// Each thread of the GPU is a fiber, and one thread of the CPU runs them in turn: until they wait, look at memory that
// others write, or end. The order of fibers, how long a copy is under way, and which block or warp rests for a while
// follow a seed. If every fiber waits for good, `run` says so.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __expf expf

struct Index {
  u32 x;
};
struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

namespace machine {
constexpr int WARP = 32, STACK = 1 << 16;

struct Meeting {  // of a number of fibers
  int arrived = 0, generation = 0;
};
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  u32 bytes, rounds;
  u64* barrier;
};
struct Warp {
  Meeting meeting;
  u32 words[WARP];
  u32 fragments[WARP][6];
  int rest = 0;  // rounds for which its fibers do not run
};
struct Block {
  std::vector<unsigned char> memory;
  std::vector<Warp> warps;
  std::vector<Copy> copies;
  Meeting barriers[16];
  int rest = 0;
};
struct Fiber {
  ucontext_t begin;
  jmp_buf context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  u32 block, thread;
  bool has_begun = false, is_blocked = false, has_ended = false;
};

static std::vector<Block> blocks;
static std::vector<std::unique_ptr<Fiber>> fibers;
static Fiber* current;
static jmp_buf scheduler;
static i64 round_number, arrivals;
static std::mt19937 seeded;
static void (*entry)();

static Block& block() { return blocks[current->block]; }
static void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.has_begun) _longjmp(fiber.context, 1);
  fiber.has_begun = true;
  setcontext(&fiber.begin);
}
static void yield(bool is_blocked = false) {
  current->is_blocked = is_blocked;
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}
static void meet(Meeting& meeting, int threads) {
  const int own = meeting.generation;
  arrivals++;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    meeting.generation++;
  }
  while (meeting.generation == own) yield(true);
}
static Warp& warp() { return block().warps[current->thread / WARP]; }
template <class Read>
static u32 exchange(u32 x, Read read) {  // read(words): of what each lane gives
  warp().words[current->thread % WARP] = x;
  meet(warp().meeting, WARP);
  const u32 y = read(warp().words);
  meet(warp().meeting, WARP);
  return y;
}
static u32 exchange_with(u32 x, int by) {
  return exchange(x, [=](const u32* words) { return words[current->thread % WARP ^ by]; });
}
static void start() {
  entry();
  current->has_ended = true;
  _longjmp(scheduler, 1);
}

// mbarrier: parity of its phase, arrivals of a phase and those that are missing, bytes that are missing.
struct Phases {
  u32 parity : 1, arrivals : 8, missing : 8;
  int bytes;
};
static_assert(sizeof(Phases) == sizeof(u64), "of one size");
static Phases& phases(u64* barrier) { return *(Phases*)barrier; }
static void end_phase_if_complete(Phases& p) {
  if (p.missing || p.bytes) return;
  p.parity ^= 1;
  p.missing = p.arrivals;
}
static void land_copies(Block& b) {
  for (Copy& copy : b.copies) {
    if (copy.rounds--) continue;
    memcpy(copy.to, copy.from, copy.bytes);
    phases(copy.barrier).bytes -= copy.bytes;
    end_phase_if_complete(phases(copy.barrier));
  }
  std::erase_if(b.copies, [](const Copy& copy) { return copy.rounds == ~0u; });
}

enum Outcome { ENDED, ALL_WAIT, COPY_UNDER_WAY };

// Launch `kernel` with so many blocks and threads.
static Outcome run(void (*kernel)(), int num_blocks, int threads, u32 shared_bytes, u32 seed) {
  entry = kernel;
  seeded.seed(seed);
  round_number = 0;
  blocks.assign(num_blocks, {});
  fibers.clear();
  for (int b = 0; b < num_blocks; b++) {
    blocks[b].memory.assign(shared_bytes + 1024, 0xff);  // not a number
    blocks[b].warps.resize(threads / WARP);
    for (int t = 0; t < threads; t++) {
      Fiber& fiber = *fibers.emplace_back(new Fiber);
      getcontext(&fiber.begin);
      fiber.begin.uc_stack.ss_sp = fiber.stack.get();
      fiber.begin.uc_stack.ss_size = STACK;
      fiber.block = b;
      fiber.thread = t;
      makecontext(&fiber.begin, start, 0);
    }
  }
  std::vector<Fiber*> order;
  for (auto& fiber : fibers) order.push_back(fiber.get());
  while (!order.empty()) {
    round_number++;
    std::rotate(order.begin(), order.begin() + seeded() % order.size(), order.end());
    if (seeded() % 64 == 0) blocks[seeded() % num_blocks].rest = seeded() % 200;
    if (seeded() % 16 == 0) blocks[seeded() % num_blocks].warps[seeded() % (threads / WARP)].rest = seeded() % 200;
    const i64 arrivals_before = arrivals;
    bool all_blocked = true;
    for (Block& b : blocks) {
      all_blocked &= !b.rest && b.copies.empty();
      for (Warp& w : b.warps) all_blocked &= !w.rest;
    }
    for (Fiber* fiber : order) {
      const Block& b = blocks[fiber->block];
      if (b.rest || b.warps[fiber->thread / WARP].rest) continue;
      resume(*fiber);
      all_blocked &= fiber->is_blocked && !fiber->has_ended;
    }
    if (all_blocked && arrivals == arrivals_before) return ALL_WAIT;
    std::erase_if(order, [](Fiber* fiber) { return fiber->has_ended; });
    for (Block& b : blocks) {
      land_copies(b);
      b.rest -= b.rest > 0;
      for (Warp& w : b.warps) w.rest -= w.rest > 0;
    }
  }
  for (Block& b : blocks)
    if (!b.copies.empty()) return COPY_UNDER_WAY;
  return ENDED;
}
}  // namespace machine

// --- of CUDA

#define threadIdx (Index{machine::current->thread})
#define blockIdx (Index{machine::current->block})
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <class A, class B>
static A min(A a, B b) {
  return a < (A)b ? a : (A)b;
}
static u32 __float_as_uint(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}
static float __uint_as_float(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static float __int_as_float(u32 x) { return __uint_as_float(x); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 x = 0;
  for (int i = 0; i < 4; i++) x |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return x;
}
template <class A>
static A max(A a, A b) {
  return a < b ? b : a;
}
static int __float2int_rn(float x) { return std::isfinite(x) ? (int)std::nearbyint(x) : 0; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static i64 clock64() { return machine::round_number << 16; }
static void __syncthreads() { machine::meet(machine::block().barriers[0], machine::block().warps.size() * machine::WARP); }
static void __syncwarp() { machine::meet(machine::warp().meeting, machine::WARP); }
static float __shfl_xor_sync(u32, float x, int by) { return __uint_as_float(machine::exchange_with(__float_as_uint(x), by)); }
static int __shfl_xor_sync(u32, int x, int by) { return machine::exchange_with(x, by); }
static bool __all_sync(u32, bool x) {
  return machine::exchange(x, [](const u32* words) { return std::all_of(words, words + machine::WARP, [](u32 y) { return y; }); });
}
static bool __any_sync(u32, bool x) { return !__all_sync(~0u, !x); }

// --- of hopper.cuh

#define shared_memory ((unsigned char*)(((uintptr_t)machine::block().memory.data() + 1023) / 1024 * 1024))
static u32 pack(float a, float b) {  // to the nearest, ties to even
  auto half = [](float x) {
    const u32 bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fffu;
  };
  return half(a) | half(b) << 16;
}
static uint4 look16(const void* p) {
  machine::yield();
  return *(const uint4*)p;
}
static u32 look4(const void* p) {
  machine::yield();
  return *(const u32*)p;
}
static void tell8(void* p, u32 x, u32 y) { ((u32*)p)[0] = x, ((u32*)p)[1] = y; }
static void tell4(void* p, u32 x) { *(u32*)p = x; }
static void tell2(void* p, u32 x) { *(u16*)p = x; }
static uint4 old16(const u16* p) { return *(const uint4*)p; }
template <int THREADS>
static void barrier(int number) {
  machine::meet(machine::block().barriers[number], THREADS);
}
static void begin(u64* barrier, u32 arrivals) { machine::phases(barrier) = {0, arrivals, arrivals, 0}; }
static void all_begun() {}
static void arrive(u64* barrier, u32 times = 1) {
  machine::phases(barrier).missing -= times;
  machine::end_phase_if_complete(machine::phases(barrier));
}
static void arrive_and_expect(u64* barrier, u32 bytes) {
  machine::phases(barrier).bytes += bytes;
  arrive(barrier);
}
static bool has_ended(u64* barrier, u32 parity) {
  machine::yield();
  return machine::phases(barrier).parity != parity;
}
static u64 read_once() { return 0; }
static void check_base() {}
static void write_if(bool holds, float* to, float x) { if (holds) *to = x; }
template <u32 MASK, u32 BITS>
static u32 masked_with(u32 x) { return x & MASK | BITS; }
static u32 looked_up(u32 at) { return *(const u32*)(shared_memory + at); }
// sum[i] += A B, for each k that this lane's sums are over: add(i, lane and word of A, lane and word of B, place in both).
template <int PLACES, class Add>
static void multiply_with(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Add add) {
  machine::Warp& warp = machine::warp();
  const int lane = machine::current->thread % machine::WARP, g = lane / 4, t = lane % 4;
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp.fragments[lane], own, sizeof own);
  machine::meet(warp.meeting, machine::WARP);
  for (int i = 0; i < 4; i++)
    for (int half = 0; half < 2; half++)
      for (int k = 0; k < 4 * PLACES; k++) {
        const int column = 2 * t + i % 2;
        add(i, warp.fragments[4 * g + k / PLACES][i / 2 + 2 * half], warp.fragments[4 * column + k / PLACES][4 + half], k % PLACES);
      }
  machine::meet(warp.meeting, machine::WARP);
}
static void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto half = [](u32 word, int upper) { return __uint_as_float(upper ? word & 0xffff0000u : word << 16); };
  multiply_with<2>(a0, a1, a2, a3, b0, b1, [&](int i, u32 a, u32 b, int k) { sum[i] += half(a, k) * half(b, k); });
}
static void multiply(int (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto byte = [](u32 word, int k) { return (int)(signed char)(word >> 8 * k); };
  multiply_with<4>(a0, a1, a2, a3, b0, b1, [&](int i, u32 a, u32 b, int k) { sum[i] += byte(a, k) * byte(b, k); });
}
static void copy(void* to, const void* from, u32 bytes, u64* barrier, u64) { machine::block().copies.push_back({(unsigned char*)to, (const unsigned char*)from, bytes, (u32)(machine::seeded() % 8), barrier}); }
