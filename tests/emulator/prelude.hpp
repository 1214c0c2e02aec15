// What stands before a CUDA C++ source that is compiled for the host: a block's threads are fibers of one thread, which
// change places at barriers and at what a warp does together. See kernels.py.
//
// Shared memory holds NaN when a block begins. A copy to it that runs ahead (cp.async) is made as late as its wait
// allows, or, with `is_eager`, at once: a wait that is missing shows in the one, a stage written too soon in the other.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifdef __x86_64__
// Keeps what a function must leave as it was on this stack, and goes on with what another stack keeps. swapcontext would
// ask the system for the mask of signals each time, which takes longer than most of what a thread does between two barriers.
extern "C" void emulated_change(void** kept, void* other) __attribute__((visibility("hidden")));
asm(R"(
.text
.type emulated_change, @function
.hidden emulated_change
.globl emulated_change
emulated_change:
  endbr64
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
.size emulated_change, .-emulated_change
)");
// A stack of so many bytes whose owner begins with `enter`: six registers, where it begins, and where that would return to.
static void* begun(char* stack, size_t bytes, void (*enter)()) {
  void** top = (void**)((uintptr_t)(stack + bytes) / 16 * 16) - 8;
  top[6] = (void*)enter; top[7] = nullptr;
  return top;
}
#else
#include <ucontext.h>

// The same by the system, slower.
static void emulated_change(void** kept, void* other) {
  ucontext_t own;
  *kept = &own;
  swapcontext(&own, (ucontext_t*)other);
}
static void* begun(char* stack, size_t bytes, void (*enter)()) {
  ucontext_t* made = (ucontext_t*)((uintptr_t)stack / 64 * 64 + 64);
  getcontext(made);
  made->uc_stack.ss_sp = made + 1, made->uc_stack.ss_size = (stack + bytes) - (char*)(made + 1);
  made->uc_link = nullptr;
  makecontext(made, enter, 0);
  return made;
}
#endif

namespace emulated {

constexpr int WARP = 32, STACK = 1 << 17, MOST_SHARED = 1 << 18;
struct Index { unsigned x, y, z; };
struct Copy { char* to; const char* from; int bytes, all; };
enum Waits { RUNS, AT_BLOCK, AT_WARP, ENDED };

struct Fiber {
  void* stack;  // where it keeps its registers while it stands
  Waits waits;
  int line;  // of the barrier that it stands at
  Index index;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
};

alignas(128) static char dynamic[MOST_SHARED];
static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static void* scheduler;
static int current, is_eager, is_reversed;
static unsigned exchanged[1024][8];
static const char* failure;
static void (*body)();

[[noreturn]] static void leave() { for (;;) emulated_change(&fibers[current].stack, scheduler); }
[[noreturn]] static void fail(const char* why) { failure = why; leave(); }

}  // namespace emulated

static emulated::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

static void stand(Waits waits, int line) {
  Fiber& fiber = fibers[current];
  fiber.waits = waits; fiber.line = line;
  emulated_change(&fiber.stack, scheduler);
}

// What every lane of a warp gives, by lane; all lanes must come.
static const unsigned (*together(std::initializer_list<unsigned> values))[8] {
  unsigned* own = exchanged[current];
  for (unsigned value : values) *own++ = value;
  stand(AT_WARP, 1);
  return &exchanged[current / WARP * WARP];
}
static void apart() { stand(AT_WARP, 2); }  // nobody writes before all have read

static float as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned as_bits(float x) { unsigned y; memcpy(&y, &x, 4); return y; }

static float shuffled_xor(unsigned mask, float x, int apart_by) {
  if (mask != ~0u) fail("a shuffle of part of a warp");
  const float found = as_float(together({as_bits(x)})[threadIdx.x % WARP ^ apart_by][0]);
  apart();
  return found;
}

static float from_half(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
static unsigned short to_half(float x) { const _Float16 y = (_Float16)x; unsigned short z; memcpy(&z, &y, 2); return z; }
static float from_bfloat(unsigned short x) { return as_float((unsigned)x << 16); }
static unsigned short to_bfloat(float x) {
  const unsigned y = as_bits(x);
  return x != x ? 0x7fff : (unsigned short)((y + 0x7fff + (y >> 16 & 1)) >> 16);
}

// m16n8k16: the sum of 16 products is exact, which a card's need not be; then it is added to c.
template <bool IS_HALF>
static void multiply(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                     unsigned b0, unsigned b1) {
  const unsigned (*given)[8] = together({a0, a1, a2, a3, b0, b1});
  const int group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4 * 2;
  auto value = [](unsigned word, int upper) {
    const unsigned short half = upper ? word >> 16 : word & 0xffff;
    return (double)(IS_HALF ? from_half(half) : from_bfloat(half));
  };
  float* sums[4] = {&c0, &c1, &c2, &c3};
  for (int i = 0; i < 4; i++) {
    const int row = group + i / 2 * 8, column = pair + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++)
      sum += value(given[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
             value(given[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    *sums[i] = (float)(*sums[i] + sum);
  }
  apart();
}

// Four 8x8 matrices of 16 bits; lane 8 i + r gives the address of row r of matrix i.
static void load_matrices(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3, unsigned from) {
  if (from % 16) fail("a matrix row that does not begin at 16 bytes");
  const unsigned (*given)[8] = together({from});
  const int lane = threadIdx.x % WARP;
  unsigned* to[4] = {&r0, &r1, &r2, &r3};
  for (int i = 0; i < 4; i++) memcpy(to[i], dynamic + given[i * 8 + lane / 4][0] + lane % 4 * 4, 4);
  apart();
}
static void load_shared(unsigned& to, unsigned from) { memcpy(&to, dynamic + from, 4); }

static void make(const Copy& copy) {
  memcpy(copy.to, copy.from, copy.bytes);
  memset(copy.to + copy.bytes, 0, copy.all - copy.bytes);
}
static void copy_ahead(unsigned to, const void* from, int bytes = 16, int is_wanted = 1) {
  if (!is_wanted) return;
  if (to % 16 || (uintptr_t)from % 16) fail("a copy of 16 bytes that do not begin at 16 bytes");
  const Copy copy = {dynamic + to, (const char*)from, bytes, 16};
  is_eager ? make(copy) : fibers[current].open.push_back(copy);
}
static void commit() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(fiber.open);
  fiber.open.clear();
}
static void wait_group(int left) {
  auto& groups = fibers[current].groups;
  while ((int)groups.size() > left) {
    for (const Copy& copy : groups.front()) make(copy);
    groups.erase(groups.begin());
  }
}
static void store_if(float* to, float value, int is_wanted) { if (is_wanted) *to = value; }
static void reciprocal(float& y, float x) { y = 1.f / x; }
static unsigned shared_address(const void* at) { return (unsigned)((const char*)at - dynamic); }

[[noreturn]] static void enter() { body(); fibers[current].waits = ENDED; leave(); }

// Lets every fiber that may run run until it stands or ends. Whether one did.
static bool run_all() {
  bool ran = false;
  const int count = (int)fibers.size();
  for (int i = 0; i < count && !failure; i++) {
    current = is_reversed ? count - 1 - i : i;
    if (fibers[current].waits != RUNS) continue;
    ran = true;
    threadIdx = fibers[current].index;
    emulated_change(&scheduler, fibers[current].stack);
  }
  return ran;
}

// Lets go of warps and of the block where all who are left stand at the same place.
static void release() {
  const int count = (int)fibers.size();
  for (int first = 0; first < count; first += WARP) {
    int standing = 0;
    for (int i = first; i < first + WARP; i++) standing += fibers[i].waits == AT_WARP && fibers[i].line == fibers[first].line;
    if (standing == WARP) for (int i = first; i < first + WARP; i++) fibers[i].waits = RUNS;
  }
  int line = 0, standing = 0, alive = 0;
  for (Fiber& fiber : fibers) {
    alive += fiber.waits != ENDED;
    if (fiber.waits != AT_BLOCK) continue;
    if (line && fiber.line != line) failure = "threads of a block at two barriers";
    line = fiber.line; standing++;
  }
  if (standing && standing == alive) for (Fiber& fiber : fibers) if (fiber.waits == AT_BLOCK) fiber.waits = RUNS;
}

}  // namespace emulated

extern "C" char __start_shared_mem[] __attribute__((weak));
extern "C" char __stop_shared_mem[] __attribute__((weak));

namespace emulated {

static void run_block(int shared_bytes) {
  memset(dynamic, 0xff, MOST_SHARED);
  if (__start_shared_mem) memset(__start_shared_mem, 0xff, __stop_shared_mem - __start_shared_mem);
  const int count = blockDim.x;
  for (int i = 0; i < count; i++) {
    Fiber& fiber = fibers[i];
    fiber.waits = RUNS; fiber.index = {(unsigned)i, 0, 0};
    fiber.open.clear(); fiber.groups.clear();
    fiber.stack = begun(&stacks[(size_t)i * STACK], STACK, enter);
  }
  while (run_all() && !failure) release();
  for (Fiber& fiber : fibers) if (fiber.waits != ENDED && !failure) failure = "threads that wait for others that have ended";
  for (int i = shared_bytes; i < MOST_SHARED && !failure; i++)
    if (dynamic[i] != (char)0xff) failure = "a write beyond the shared memory that was asked for";
}

// Every block of the grid, one after another. Why it failed, or null.
static const char* launch(void (*kernel)(), const unsigned* grid, int threads, int shared_bytes, int eager, int reversed) {
  body = kernel; is_eager = eager; is_reversed = reversed; failure = nullptr;
  gridDim = {grid[0], grid[1], grid[2]}; blockDim = {(unsigned)threads, 1, 1};
  if (threads % WARP || threads > 1024) return "a block of threads that are no whole warps";
  if (stacks.size() < (size_t)threads * STACK) stacks.resize((size_t)threads * STACK);
  fibers.resize(threads);
  for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < grid[0] && !failure; blockIdx.x++) run_block(shared_bytes);
  return failure;
}

}  // namespace emulated

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float __uint_as_float(unsigned x) { return emulated::as_float(x); }
template <class A, class B> static auto min(A a, B b) { return a < b ? a : b; }
template <class A, class B> static auto max(A a, B b) { return a > b ? a : b; }

#define __device__
#define __forceinline__ inline
#define __global__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("shared_mem")))
#define __launch_bounds__(...)
#define __syncthreads() emulated::stand(emulated::AT_BLOCK, __LINE__)
#define __syncwarp() emulated::stand(emulated::AT_WARP, 3)
#define __shfl_xor_sync emulated::shuffled_xor
#define __cvta_generic_to_shared emulated::shared_address
