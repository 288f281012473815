// What CUDA C++ has no words for: instructions of compute capability 9.0, in PTX.
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Two numbers as bfloat16, the first in the lower half.
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}

// --- memory that other blocks write meanwhile

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
__device__ __forceinline__ void tell8(void* p, u32 x, u32 y) { asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"((u64)y << 32 | x) : "memory"); }
__device__ __forceinline__ void tell4(void* p, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(x) : "memory"); }
__device__ __forceinline__ void tell2(void* p, u32 x) { asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(p), "h"((u16)x) : "memory"); }

// Written by an earlier launch; not kept in L1.
__device__ __forceinline__ uint4 old16(const u16* p) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
  return x;
}

// --- barriers

// Of so many threads of the block. Each number is another barrier.
template <int THREADS>
__device__ __forceinline__ void barrier(int number) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// In shared memory, in phases: one ends after so many arrivals, and when every expected byte is there.
__device__ __forceinline__ void begin(u64* barrier, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(shared(barrier)), "r"(arrivals)); }
__device__ __forceinline__ void all_begun() {  // before a copy may use them
  asm volatile("fence.mbarrier_init.release.cluster;");
  asm volatile("fence.proxy.async;");
}
__device__ __forceinline__ void arrive(u64* barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared(barrier)) : "memory"); }
__device__ __forceinline__ void arrive(u64* barrier, u32 times) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0],%1;" ::"r"(shared(barrier)), "r"(times) : "memory"); }
__device__ __forceinline__ void arrive_and_expect(u64* barrier, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared(barrier)), "r"(bytes) : "memory"); }
// Whether a phase of this parity has ended.
__device__ __forceinline__ bool has_ended(u64* barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(shared(barrier)), "r"(parity) : "memory");
  return done;
}

// --- copies to shared memory, which go on meanwhile

__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared(to)), "l"(from), "r"(bytes), "r"(shared(barrier)), "l"(policy) : "memory");
}

// --- tensor cores, and a table

// mma.m16n8k16: a lane has its fragments as the PTX manual places them.
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// mma.m16n8k32, of signed bytes: exact.
__device__ __forceinline__ void multiply(int (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void write_if(bool holds, float* to, float x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p,%0,0;\n@p st.shared.f32 [%1],%2;\n}" ::"r"((u32)holds), "r"(shared(to)), "f"(x) : "memory");
}
// x & MASK | BITS, in one instruction.
template <u32 MASK, u32 BITS>
__device__ __forceinline__ u32 masked_with(u32 x) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "n"(MASK), "n"(BITS));
  return r;
}
// Where shared memory begins. As an immediate it costs no addition for each lookup.
constexpr u32 BASE = 1024;
__device__ __forceinline__ void check_base() {
  if (shared(shared_memory) != BASE) __trap();
}
__device__ __forceinline__ u32 looked_up(u32 at) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1 + %2];" : "=r"(x) : "r"(at), "n"(BASE));
  return x;
}
