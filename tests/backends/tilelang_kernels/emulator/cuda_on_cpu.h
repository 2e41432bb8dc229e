// Runs CUDA source that TileLang generates on a CPU, one block after another, every thread a fiber of its own.
//
// Only what the kernels of this library use is here. Asynchronous work is done as late as it may be (`late`) or as early
// as it may be, threads go on in an order of `seed`, shared memory starts as NaN, and a block in which nobody can go on
// is reported: a missing wait, a barrier that waits for ever and memory that nobody wrote show as they would on a GPU,
// only every time. The products take sixteen terms at once and cut the sum to 24 bits, as tensor cores do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define CUDART_INF_F INFINITY

typedef unsigned char uchar;
typedef unsigned int uint;

// Types

struct uint1 { uint x; };
struct alignas(8) uint2 { uint x, y; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

static inline float bits_to_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

struct bfloat16_t {
  uint16_t raw;
  bfloat16_t() = default;
  explicit bfloat16_t(float f) {
    uint32_t bits = float_to_bits(f);
    raw = f != f ? 0x7fff : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  operator float() const { return bits_to_float(uint32_t(raw) << 16); }
};

struct half_t {
  _Float16 value;
  half_t() = default;
  explicit half_t(float f) : value(_Float16(f)) {}
  operator float() const { return float(value); }
};

struct __nv_bfloat162 { bfloat16_t x, y; };
struct __half2 { half_t x, y; };
typedef __half2 half2;
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
static inline __half2 __float22half2_rn(float2 v) { return {half_t(v.x), half_t(v.y)}; }
static inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
template <class H> static inline uint pack_pair(H x, H y) {
  uint16_t low, high;
  std::memcpy(&low, &x, 2);
  std::memcpy(&high, &y, 2);
  return low | uint(high) << 16;
}
static inline uint __pack_half2(bfloat16_t x, bfloat16_t y) { return pack_pair(x, y); }
static inline uint __pack_half2(half_t x, half_t y) { return pack_pair(x, y); }

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

// Threads

namespace emulator {

constexpr int MOST_THREADS = 1024, STACK = 1 << 16, SHARED = 1 << 18;
constexpr int SMEM_LIMIT = 232448;

extern "C" void emulator_switch(void **save, void *load);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Copy { char *to; const char *from; bool real; void *barrier; };
struct Product { int kind, n; bool turned_a, turned_b; uint64_t a, b; const uint16_t *regs; float *acc; int keep; };
struct Fiber {
  void *sp;
  bool done;
  const char *waits;
  std::deque<Copy> copies;            // not yet done
  std::deque<int> groups;             // copies of each committed group, the oldest first
  int open;                           // copies since the last commit
  std::vector<std::vector<Product>> batches;  // committed and not yet waited for
  std::vector<Product> products;
};
struct Warp { int arrived, op; uint64_t generation, in[32], out[32]; };
struct Named { int arrived, count; uint64_t generation; };

struct State {
  Fiber fibers[MOST_THREADS];
  Warp warps[MOST_THREADS / 32];
  Named named[16];
  void *scheduler;
  int threads, current;
  uint64_t events;
  bool late;
  uint32_t random;
  char *stacks;
  char error[512];
};
static State S;
alignas(1 << 18) static uchar shared_memory[SHARED];

struct Index { int x, y, z; };
}  // namespace emulator

static emulator::Index threadIdx, blockIdx;
#define buf_dyn_shmem emulator::shared_memory

namespace emulator {

[[gnu::noinline]] static void yield(const char *why) {
  Fiber &f = S.fibers[S.current];
  f.waits = why;
  emulator_switch(&f.sp, S.scheduler);
  asm volatile("" ::: "memory");
}

[[noreturn]] static void fail(const char *what) {
  std::snprintf(S.error, sizeof S.error, "thread %d of block %d: %s", threadIdx.x, blockIdx.x, what);
  for (;;) { S.fibers[S.current].done = true; S.events++; yield("failed"); }
}

template <class Ready> [[gnu::noinline]] static void wait_until(Ready ready, const char *why) {
  while (!ready()) yield(why);
  asm volatile("" ::: "memory");
}

// Every lane gives a value and sees those of all, once all have come to the same operation.
[[gnu::noinline]] static const uint64_t *exchange(uint64_t value, int op) {
  Warp &w = S.warps[threadIdx.x / 32];
  if (w.arrived && w.op != op) fail("lanes of a warp are at different operations");
  w.op = op;
  w.in[threadIdx.x % 32] = value;
  uint64_t mine = w.generation;
  if (++w.arrived == 32) {
    std::memcpy(w.out, w.in, sizeof w.in);
    w.arrived = 0;
    w.generation++;
    S.events++;
  } else {
    wait_until([&] { return w.generation != mine; }, "for the lanes of its warp");
  }
  return w.out;
}

[[gnu::noinline]] static void bar_sync(int id, int count) {
  Named &b = S.named[id];
  if (b.arrived && b.count != count) fail("one barrier with two counts");
  b.count = count;
  uint64_t mine = b.generation;
  if (++b.arrived == count) {
    b.arrived = 0;
    b.generation++;
    S.events++;
  } else {
    wait_until([&] { return b.generation != mine; }, "at a barrier of threads");
  }
}

struct Mbarrier {
  uint16_t expected, pending;
  uint32_t phase;
  void init(int count) { expected = pending = count; phase = 0; }
  void arrive() {
    if (!expected) fail("arrives at a barrier that was not initialised");
    if (--pending == 0) { pending = expected; phase++; S.events++; }
  }
  void wait(uint32_t parity) {
    wait_until([&] { return (phase & 1) != parity; }, "at a barrier in shared memory");
  }
};

// Asynchronous copies

static void do_copy(const Copy &c) {
  if (c.barrier) {
    ((Mbarrier *)c.barrier)->arrive();
  } else if (c.real) {
    std::memcpy(c.to, c.from, 16);
  } else {
    std::memset(c.to, 0, 16);
  }
}

static void drain(Fiber &f, size_t keep) {
  while (f.copies.size() > keep) {
    do_copy(f.copies.front());
    f.copies.pop_front();
  }
}

// Products

static inline uint32_t swizzled(uint32_t address, int layout) {
  int bits = layout == 1 ? 3 : layout == 2 ? 2 : layout == 3 ? 1 : 0;
  return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4);
}

// Element (r, k) of an operand in shared memory, r along M or N.
static inline uint16_t element(uint64_t descriptor, bool turned, int r, int k) {
  uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  int layout = descriptor >> 62;
  uint32_t row = layout == 1 ? 128 : layout == 2 ? 64 : layout == 3 ? 32 : 16;
  uint32_t at;
  if (layout == 0) {
    // Bricks of 8 rows of 16 bytes.
    int along = turned ? k : r, across = turned ? r : k;
    at = start + (across / 8) * leading + (along / 8) * stride + (along % 8) * 16 + (across % 8) * 2;
  } else if (turned) {
    int wide = row / 2;
    at = start + (r % wide) * 2 + (r / wide) * leading + (k % 8) * row + (k / 8) * stride;
  } else {
    at = start + (r % 8) * row + (r / 8) * stride + k * 2;
  }
  at = swizzled(at, layout);
  uint16_t value;
  std::memcpy(&value, shared_memory + at, 2);
  return value;
}

static inline float widened(uint16_t raw, int kind) {
  if (kind == 0) return bits_to_float(uint32_t(raw) << 16);
  _Float16 h;
  std::memcpy(&h, &raw, 2);
  return float(h);
}

static inline float cut(double value) {
  float f = float(value);
  if (std::isfinite(f) && std::fabs(double(f)) > std::fabs(value)) f = std::nextafterf(f, 0.0f);
  return f;
}

// The 16 rows of one warp.
static void multiply(Product *of_lane[32], int warp) {
  const Product &p = *of_lane[0];
  static float a[16][16], b[256][16];
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 16; k++) {
      if (of_lane[0]->regs) {
        const Product &q = *of_lane[r % 8 * 4 + k % 8 / 2];
        a[r][k] = widened(q.regs[(k / 8) * 4 + (r / 8) * 2 + k % 2], p.kind);
      } else {
        a[r][k] = widened(element(p.a, p.turned_a, warp % 4 * 16 + r, k), p.kind);
      }
    }
  for (int n = 0; n < p.n; n++)
    for (int k = 0; k < 16; k++) b[n][k] = widened(element(p.b, p.turned_b, n, k), p.kind);
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < p.n; n++) {
      double sum = 0;
      for (int k = 0; k < 16; k++) sum += double(a[r][k]) * double(b[n][k]);
      float &to = of_lane[r % 8 * 4 + n % 8 / 2]->acc[n / 8 * 4 + r / 8 * 2 + n % 2];
      to = cut((p.keep ? double(to) : 0.0) + sum);
    }
}

static void multiply_batches(int warp, size_t keep) {
  Fiber *f = S.fibers + warp * 32;
  while (f->batches.size() > keep) {
    for (size_t i = 0; i < f->batches[0].size(); i++) {
      Product *of_lane[32];
      for (int lane = 0; lane < 32; lane++) of_lane[lane] = &f[lane].batches[0][i];
      multiply(of_lane, warp);
    }
    for (int lane = 0; lane < 32; lane++) f[lane].batches.erase(f[lane].batches.begin());
  }
}

[[gnu::noinline]] static void products_done(size_t keep) {
  int warp = threadIdx.x / 32;
  exchange(keep, 1);
  if (threadIdx.x % 32 == 0) multiply_batches(warp, keep);
  exchange(keep, 2);
}

// Blocks

static void (*body)();

static void fiber_main() {
  asm volatile("" ::: "memory");
  body();
  Fiber &f = S.fibers[S.current];
  if (!f.batches.empty() || !f.products.empty()) std::snprintf(S.error, sizeof S.error, "a product nobody waited for");
  f.done = true;
  S.events++;
  for (;;) yield("done");
}

static uint32_t next_random() {
  S.random = S.random * 1664525u + 1013904223u;
  return S.random >> 8;
}

static bool run_block(int threads) {
  S.threads = threads;
  std::memset(S.warps, 0, sizeof S.warps);
  std::memset(S.named, 0, sizeof S.named);
  std::memset(shared_memory, 0xff, SHARED);
  static int order[MOST_THREADS];
  for (int t = 0; t < threads; t++) {
    Fiber &f = S.fibers[t];
    f.done = false;
    f.copies.clear();
    f.groups.clear();
    f.open = 0;
    f.batches.clear();
    f.products.clear();
    uint64_t *top = (uint64_t *)(S.stacks + size_t(t + 1) * STACK);
    *--top = 0;
    *--top = (uint64_t)fiber_main;
    for (int i = 0; i < 6; i++) *--top = 0;
    f.sp = top;
    order[t] = t;
  }
  for (;;) {
    // Whole warps in any order: what one finds done must not hang on who came first.
    int warps = threads / 32;
    for (int w = warps - 1; w > 0; w--) {
      int other = next_random() % (w + 1);
      for (int lane = 0; lane < 32; lane++) std::swap(order[w * 32 + lane], order[other * 32 + lane]);
    }
    uint64_t before = S.events;
    bool all = true;
    for (int i = 0; i < threads; i++) {
      Fiber &f = S.fibers[order[i]];
      if (f.done) continue;
      all = false;
      S.current = order[i];
      threadIdx.x = order[i];
      emulator_switch(&S.scheduler, f.sp);
      if (S.error[0]) return false;
    }
    if (all) break;
    if (S.events == before) {
      // Nobody can go on: now copies that were put off are done, one thread's after the other.
      for (int i = 0; i < threads; i++) {
        S.current = order[i];
        threadIdx.x = order[i];
        drain(S.fibers[order[i]], 0);
        if (S.events != before) break;
      }
      if (S.events == before) {
        for (int i = 0; i < threads; i++)
          if (!S.fibers[order[i]].done) {
            std::snprintf(S.error, sizeof S.error, "block %d: nobody can go on; thread %d waits %s", blockIdx.x, order[i],
                          S.fibers[order[i]].waits);
            return false;
          }
      }
    }
  }
  return true;
}

static const char *run_grid(void (*kernel)(), int grid, int threads, int late, int seed) {
  if (!S.stacks) S.stacks = (char *)std::aligned_alloc(4096, size_t(MOST_THREADS) * STACK);
  S.error[0] = 0;
  S.late = late;
  S.random = seed;
  body = kernel;
  for (int block = 0; block < grid; block++) {
    blockIdx.x = block;
    if (!run_block(threads)) break;
  }
  return S.error;
}

}  // namespace emulator

// What the source calls

typedef emulator::Mbarrier Barrier;

static inline void __syncthreads() { emulator::bar_sync(0, emulator::S.threads); }

template <class V> static inline V lane_value(const uint64_t *all, int lane) {
  V v;
  std::memcpy(&v, all + lane, sizeof v);
  return v;
}
template <class V> static inline uint64_t as_bits(V v) {
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class V> static inline V __shfl_xor_sync(uint, V v, int mask) {
  return lane_value<V>(emulator::exchange(as_bits(v), 3), (threadIdx.x % 32) ^ mask);
}
template <class V> static inline V __shfl_up_sync(uint, V v, int by) {
  int lane = threadIdx.x % 32;
  return lane_value<V>(emulator::exchange(as_bits(v), 4), lane >= by ? lane - by : lane);
}
template <class V> static inline V __shfl_sync(uint, V v, int from) {
  return lane_value<V>(emulator::exchange(as_bits(v), 5), from % 32);
}
static inline int __any_sync(uint, int value) {
  const uint64_t *all = emulator::exchange(value != 0, 6);
  for (int lane = 0; lane < 32; lane++)
    if (all[lane]) return 1;
  return 0;
}

template <class V> static inline V atomicAdd(V *to, V value) { V old = *to; *to = old + value; return old; }
template <class A, class V> static inline void AtomicAdd(A *to, V value) { *to = *to + A(value); }
template <class A, class V> static inline void AtomicAdd(A &to, V value) { to = to + A(value); }
static inline void AtomicAddx2(float *to, float *value) { to[0] += value[0]; to[1] += value[1]; }
static inline void AtomicAddx2(float *to, float2 value) { to[0] += value.x; to[1] += value.y; }

namespace tl {

enum class DataType { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

struct GmmaDescriptor {
  uint64_t desc_ = 0;
  operator uint64_t() const { return desc_; }
  GmmaDescriptor operator+(int offset) const {
    GmmaDescriptor r;
    r.desc_ = (desc_ & ~0xffffffffull) | uint32_t(uint32_t(desc_) + uint32_t(offset));
    return r;
  }
};
template <int layout, int leading, int stride, class T>
static inline void initialize_wgmma_descriptor(GmmaDescriptor &d, T *start) {
  uint32_t address = uint32_t((char *)start - (char *)emulator::shared_memory);
  d.desc_ = (address >> 4) | uint64_t(leading) << 16 | uint64_t(stride) << 32 | uint64_t(layout) << 62;
}
template <class T> static inline void increase_descriptor_offset(GmmaDescriptor &d, T offset) {
  d = d + int(offset >> 4);
}

template <class T> static inline void warpgroup_fence_operand(T *, int) {}
static inline void warpgroup_arrive() {}
template <int n> static inline void warpgroup_reg_alloc() {}
template <int n> static inline void warpgroup_reg_dealloc() {}
static inline void fence_proxy_async() {}
static inline void fence_barrier_init() {}
template <int> static inline bool tl_shuffle_elect() { return threadIdx.x == 0; }
static inline void __sync_thread_partial(int id, int count) { emulator::bar_sync(id, count); }

template <DataType A, DataType B, DataType C, int M, int N, int K, bool turned_a, bool turned_b, int, int>
static inline void wgmma_ss(uint64_t a, uint64_t b, uint32_t *acc, int keep) {
  emulator::S.fibers[threadIdx.x].products.push_back(
      {int(A), N, turned_a, turned_b, a, b, nullptr, (float *)acc, keep});
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool turned_a, bool turned_b, int, int>
static inline void wgmma_rs(const uint32_t *a, uint64_t b, uint32_t *acc, int keep) {
  emulator::S.fibers[threadIdx.x].products.push_back(
      {int(A), N, false, turned_b, 0, b, (const uint16_t *)a, (float *)acc, keep});
}
static inline void warpgroup_commit_batch() {
  emulator::Fiber &f = emulator::S.fibers[threadIdx.x];
  f.batches.push_back(f.products);
  f.products.clear();
  if (!emulator::S.late) emulator::products_done(0);
}
template <int n> static inline void wait_wgmma() { emulator::products_done(n); }
template <int n> static inline void warpgroup_wait() { emulator::products_done(n); }

template <int bytes> static inline void cp_async_gs_conditional(const void *to, const void *from, bool real) {
  static_assert(bytes == 16, "16 bytes");
  if ((uint64_t)to % 16 || (uint64_t)from % 16) emulator::fail("a copy of 16 bytes is not aligned");
  uint64_t place = (const uchar *)to - emulator::shared_memory;
  if (place + 16 > emulator::SMEM_LIMIT) emulator::fail("a copy leaves shared memory");
  emulator::Fiber &f = emulator::S.fibers[threadIdx.x];
  f.copies.push_back({(char *)to, (const char *)from, real, nullptr});
  f.open++;
  if (!emulator::S.late) emulator::drain(f, 0);
}
static inline void cp_async_commit() {
  emulator::Fiber &f = emulator::S.fibers[threadIdx.x];
  f.groups.push_back(f.open);
  f.open = 0;
}
template <int n> static inline void cp_async_wait() {
  emulator::Fiber &f = emulator::S.fibers[threadIdx.x];
  // Copies that are in the last n groups may still be under way; with n = 0 nothing is, committed or not.
  size_t keep = n ? f.open : 0;
  while (int(f.groups.size()) > n) f.groups.pop_front();
  for (int size : f.groups) keep += size;
  if (!n) f.open = 0;
  emulator::drain(f, std::min(keep, f.copies.size()));
}
template <class B> static inline void mbarrier_cp_async_arrive_noinc(B &barrier) {
  emulator::Fiber &f = emulator::S.fibers[threadIdx.x];
  f.copies.push_back({nullptr, nullptr, false, (void *)&barrier});
  if (!emulator::S.late) emulator::drain(f, 0);
}

static inline void matrix(bool store, bool turned, const void *row, uint32_t *values, int count) {
  const uint64_t *all = emulator::exchange((uint64_t)row, 7);
  int lane = threadIdx.x % 32;
  uint64_t rows[32];
  std::memcpy(rows, all, sizeof rows);
  for (int m = 0; m < count; m++)
    for (int half = 0; half < 2; half++) {
      int i = lane / 4, j = lane % 4 * 2 + half;
      uint16_t *at = (uint16_t *)(turned ? rows[m * 8 + j] : rows[m * 8 + i]) + (turned ? i : j);
      uint16_t *mine = (uint16_t *)(values + m) + half;
      if (store) *at = *mine; else *mine = *at;
    }
  emulator::exchange(0, 8);
}
static inline void ptx_ldmatrix_x4(const void *row, void *to) { matrix(false, false, row, (uint32_t *)to, 4); }
static inline void ptx_ldmatrix_x2(const void *row, void *to) { matrix(false, false, row, (uint32_t *)to, 2); }
static inline void ptx_ldmatrix_x4_trans(const void *row, void *to) { matrix(false, true, row, (uint32_t *)to, 4); }
static inline void ptx_ldmatrix_x2_trans(const void *row, void *to) { matrix(false, true, row, (uint32_t *)to, 2); }
static inline void ptx_stmatrix_m8n8_x4(const void *row, uint a, uint b, uint c, uint d) {
  uint32_t values[4] = {a, b, c, d};
  matrix(true, false, row, values, 4);
}
static inline void ptx_stmatrix_m8n8_x2(const void *row, uint a, uint b) {
  uint32_t values[2] = {a, b};
  matrix(true, false, row, values, 2);
}
static inline void ptx_stmatrix_m8n8_x4_trans(const void *row, uint a, uint b, uint c, uint d) {
  uint32_t values[4] = {a, b, c, d};
  matrix(true, true, row, values, 4);
}

// mma.m16n8k16, row by column: each lane's registers are seen by the others of its warp.
template <DataType A, DataType B, DataType C, int M, int N, int K, bool, bool>
static inline void mma_sync(float *c, const unsigned *a, const unsigned *b) {
  static_assert(M == 16 && N == 8 && K == 16, "m16n8k16");
  const uint16_t *pa[32], *pb[32];
  std::memcpy(pa, emulator::exchange((uint64_t)a, 9), sizeof pa);
  std::memcpy(pb, emulator::exchange((uint64_t)b, 10), sizeof pb);
  int lane = threadIdx.x % 32;
  float result[4];
  for (int i = 0; i < 4; i++) {
    int r = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      uint16_t x = pa[r % 8 * 4 + k % 8 / 2][k / 8 * 4 + r / 8 * 2 + k % 2];
      uint16_t y = pb[n * 4 + k % 8 / 2][k / 8 * 2 + k % 2];
      sum += double(emulator::widened(x, int(A))) * double(emulator::widened(y, int(B)));
    }
    result[i] = emulator::cut(double(c[i]) + sum);
  }
  emulator::exchange(0, 11);
  std::memcpy(c, result, sizeof result);
}

static inline float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
static inline float2 sub2(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
static inline float2 mul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
static inline float2 max2(float2 a, float2 b) { return {max(a.x, b.x), max(a.y, b.y)}; }
static inline float2 fma2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }

struct SumOp { template <class T> T operator()(T x, T y) { return x + y; } };
struct MaxOp { template <class T> T operator()(T x, T y) { return max(x, y); } };
template <int count> struct NamedBarrier { static void sync(int id) { emulator::bar_sync(id, count); } };
struct SyncThreadsBarrier { static void sync(int) { __syncthreads(); } };
template <class Op, int threads, int scale, int offset = 0, class B = SyncThreadsBarrier, int = 1, int = 0>
struct AllReduce {
  template <class T> static T run(T x, T *buffer = nullptr) {
    for (int step = threads / 2; step >= scale; step /= 2) {
      if (step >= 32) {
        B::sync(1);
        buffer[threadIdx.x - offset] = x;
        B::sync(2);
        x = Op()(x, buffer[(threadIdx.x - offset) ^ step]);
      } else {
        x = Op()(x, __shfl_xor_sync(uint(-1), x, step));
      }
    }
    return x;
  }
};

}  // namespace tl
