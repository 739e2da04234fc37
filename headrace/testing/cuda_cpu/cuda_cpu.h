// Gives CUDA C++ its meaning on one CPU thread, so that kernels are tested without a GPU.
// Each CUDA thread is a fiber that leaves its turn only in a barrier or a warp collective; whose turn is next
// follows the order a test chose. Blocks run one after the other. Shared memory is dynamic only, starts as
// 0xFF (NaN), and ends where the launch said, so that the address sanitizer sees its bounds.
// A barrier or collective that some thread never reaches fails the launch with who waits where.
// Under the thread sanitizer, barriers and collectives order what CUDA orders; with `unordered` blocks are not
// ordered among themselves, so a missing fence shows too.
#pragma once
#define CUDA_ON_CPU 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (cuda_cpu::thread->index)
#define blockIdx (cuda_cpu::grid.block)
#define blockDim (cuda_cpu::grid.block_size)
#define gridDim (cuda_cpu::grid.size)
#define SHARED_MEMORY(name) char* name = cuda_cpu::shared

namespace cuda_cpu {

enum class Order { kForward, kReverse, kRandom };
enum class State { kReady, kInWarp, kAtBarrier, kDone };

struct Value { alignas(16) unsigned char bytes[64]; };
struct Exchange {  // what the lanes of one collective handed in
  Value values[32];
  uint32_t mask, parities;
};
struct Copy { void* to; const void* from; bool ends_group, is_short; };

struct Thread : Stack {
  uint3 index;
  unsigned number, lane;
  State state;
  const char* operation;
  int line;
  uint32_t mask;
  unsigned barriers, collectives;  // how many it has passed: their parity chooses a tag
  const Exchange* received;
  std::deque<Copy> copies;         // asynchronous ones that have not landed
};

struct Warp {
  Value given[32];
  Exchange recent[8];
  unsigned next;
};

struct Grid { uint3 block; dim3 block_size, size; };

constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr size_t kTags = 2 + 2 * 1024;  // two for the block, two for each thread

inline Grid grid;
inline Thread* thread;
inline char* shared;
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline std::string failure;
inline Order order;
inline unsigned seed;
inline bool unordered, early_copies;
inline char tags_of_all[kTags], end_tag, *tags = tags_of_all;
inline std::vector<char*> left_shared, left_stacks;
inline std::vector<void*> left_fibers;

inline void fail(const std::string& text) { if (failure.empty()) failure = text; }
inline std::string at(const char* operation, int line) {
  return std::string(operation) + " at line " + std::to_string(line);
}
inline void wait_turn(bool ends = false) { switch_stack(*thread, home, ends); }

inline void arrive(const char* operation, int line) {
  Untracked untracked;
  Thread& me = *thread;
  void* tag = tags + (me.barriers++ & 1);
  me.operation = operation;
  me.line = line;
  me.state = State::kAtBarrier;
  release(tag);
  wait_turn();
  acquire(tag);
}

// Every lane of `mask` hands in a value and sees those of the others. Memory is ordered by __syncwarp alone.
template <class T>
inline const Exchange& exchange(const char* operation, uint32_t mask, const T& value, int line, bool orders = false) {
  static_assert(sizeof(T) <= sizeof(Value), "a lane hands in 64 bytes at most");
  Untracked untracked;
  Thread& me = *thread;
  memcpy(warps[me.number / 32].given[me.lane].bytes, &value, sizeof value);
  me.operation = operation;
  me.mask = mask;
  me.line = line;
  me.state = State::kInWarp;
  char* of_warp = tags + 2 + me.number / 32 * 64;
  if (orders) release(of_warp + me.lane * 2 + (me.collectives & 1));
  wait_turn();
  const Exchange& got = *me.received;
  for (unsigned i = 0; i < 32; i++)
    if (orders && got.mask >> i & 1) acquire(of_warp + i * 2 + (got.parities >> i & 1));
  return got;
}

template <class T>
inline T taken(const Exchange& from, unsigned lane) {
  T value;
  memcpy(&value, from.values[lane].bytes, sizeof value);
  return value;
}

// Complete the collectives of one warp whose lanes have all come.
inline void complete_collectives(unsigned warp) {
  const unsigned first = warp * 32, count = std::min<size_t>(32, threads.size() - first);
  const uint32_t present = count == 32 ? ~0u : (1u << count) - 1;
  uint32_t seen = 0;
  for (unsigned i = 0; i < count; i++) {
    Thread& one = threads[first + i];
    if (one.state != State::kInWarp || seen >> i & 1) continue;
    if (!(one.mask >> i & 1)) return fail(at(one.operation, one.line) + ": lane " + std::to_string(i) + " is not in its own mask");
    const uint32_t mask = one.mask & present;
    bool all_here = true;
    for (unsigned j = 0; j < count && all_here; j++) {
      if (!(mask >> j & 1)) continue;
      const Thread& other = threads[first + j];
      if (other.state == State::kDone)
        return fail(at(one.operation, one.line) + ": the mask names lane " + std::to_string(j) + ", which has exited");
      if (other.state != State::kInWarp) all_here = false;
      else if (other.mask != one.mask || strcmp(other.operation, one.operation))
        return fail("lanes of one warp meet in different collectives: " + at(one.operation, one.line) + ", " + at(other.operation, other.line));
    }
    if (!all_here) continue;
    Warp& w = warps[warp];
    Exchange& result = w.recent[w.next++ % 8];
    result.mask = mask;
    result.parities = 0;
    for (unsigned j = 0; j < count; j++) {
      if (!(mask >> j & 1)) continue;
      Thread& other = threads[first + j];
      result.values[j] = w.given[j];
      result.parities |= (other.collectives++ & 1) << j;
      other.received = &result;
      other.state = State::kReady;
      seen |= 1u << j;
    }
  }
}

inline void fail_stuck() {
  std::map<std::string, std::vector<unsigned>> waiting;
  unsigned done = 0;
  for (const Thread& t : threads)
    if (t.state == State::kDone) done++;
    else waiting[at(t.operation, t.line)].push_back(t.number);
  std::string text = "synchronisation never completes in block (" + std::to_string(grid.block.x) + ", " + std::to_string(grid.block.y) + ", " + std::to_string(grid.block.z) + "): ";
  for (const auto& [where, who] : waiting)
    text += where + " waits with " + std::to_string(who.size()) + " threads from thread " + std::to_string(who[0]) + "; ";
  fail(text + std::to_string(done) + " threads have exited");
}

struct Body { virtual void operator()() = 0; };
inline Body* body;

inline void thread_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &home_bottom, &home_size);
#endif
  (*body)();
  {
    Untracked untracked;
    release(&end_tag);
    thread->state = State::kDone;
  }
  wait_turn(true);
  __builtin_unreachable();
}

inline void start_threads() {
  for (unsigned i = 0; i < threads.size(); i++) {
    Thread& t = threads[i];
    t.index = make_uint3(i % grid.block_size.x, i / grid.block_size.x % grid.block_size.y, i / grid.block_size.x / grid.block_size.y);
    t.number = i;
    t.lane = i % 32;
    t.state = State::kReady;
    t.barriers = t.collectives = 0;
    t.fake_stack = nullptr;
    t.copies.clear();
    if (unordered) {
      left_stacks.push_back(t.memory);
      t.memory = map_stack();
    }
    prepare_stack(t, thread_main);
#if defined(__SANITIZE_THREAD__)
    t.sanitizer_fiber = __tsan_create_fiber(0);
#endif
  }
}

inline void end_threads() {
#if defined(__SANITIZE_THREAD__)
  for (Thread& t : threads)
    if (unordered) left_fibers.push_back(t.sanitizer_fiber);
    else __tsan_destroy_fiber(t.sanitizer_fiber);
#endif
  if (!unordered) acquire(&end_tag);
}

// Let every thread that can run have its turn; complete what can complete. False: nobody is left, or failure.
inline bool run_round(std::mt19937& random, std::vector<unsigned>& turns) {
  const unsigned count = threads.size();
  if (order == Order::kRandom) std::shuffle(turns.begin(), turns.end(), random);
  for (unsigned k = 0; k < count && failure.empty(); k++) {
    Thread& t = threads[turns[order == Order::kReverse ? count - 1 - k : k]];
    if (t.state != State::kReady) continue;
    thread = &t;
    switch_stack(home, t);
  }
  for (unsigned w = 0; w < warps.size() && failure.empty(); w++) complete_collectives(w);
  if (!failure.empty()) return false;
  unsigned done = 0, arrived = 0, ready = 0;
  for (const Thread& t : threads) {
    done += t.state == State::kDone;
    arrived += t.state == State::kAtBarrier;
    ready += t.state == State::kReady;
  }
  if (done == count) return false;
  if (arrived && arrived + done == count) {  // a thread that has exited counts as arrived, as on the device
    for (Thread& t : threads)
      if (t.state == State::kAtBarrier) t.state = State::kReady;
  } else if (!ready) {
    fail_stuck();
    return false;
  }
  return true;
}

inline void run_block(size_t shared_bytes, std::mt19937& random, std::vector<unsigned>& turns) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, shared_bytes ? shared_bytes : 1)) return fail("out of memory");
  shared = static_cast<char*>(memory);
  memset(shared, 0xFF, shared_bytes);
  start_threads();
  while (run_round(random, turns)) {}
  end_threads();
  if (unordered) {
    left_shared.push_back(shared);
    tags += kTags;
  } else {
    free(shared);
  }
}

inline void resize(unsigned count) {
  for (size_t i = count; i < threads.size(); i++) munmap(threads[i].memory, kStackBytes);
  const size_t before = threads.size();
  threads.resize(count);
  for (size_t i = before; i < count; i++) threads[i].memory = map_stack();
  warps.assign((count + 31) / 32, Warp());
}

inline int launch(Body& kernel, const unsigned* size, const unsigned* block_size, size_t shared_bytes) {
  Untracked untracked;
  failure.clear();
  body = &kernel;
  const size_t count = size_t(block_size[0]) * block_size[1] * block_size[2];
  const size_t num_blocks = size_t(size[0]) * size[1] * size[2];
  if (count == 0 || count > 1024 || num_blocks == 0 || size[1] > 65535 || size[2] > 65535 || shared_bytes > kMaxSharedBytes) {
    fail("invalid launch: " + std::to_string(num_blocks) + " blocks of " + std::to_string(count) + " threads (1 to 1024) with " + std::to_string(shared_bytes) + " bytes of shared memory (at most " + std::to_string(kMaxSharedBytes) + ")");
    return 1;
  }
  grid.size = dim3(size[0], size[1], size[2]);
  grid.block_size = dim3(block_size[0], block_size[1], block_size[2]);
  if (threads.size() != count) resize(count);
#if defined(__SANITIZE_THREAD__)
  home.sanitizer_fiber = __tsan_get_current_fiber();
#endif
  std::mt19937 random(seed);
  std::vector<unsigned> turns(count);
  std::vector<size_t> blocks(num_blocks);
  for (size_t i = 0; i < count; i++) turns[i] = i;
  for (size_t i = 0; i < num_blocks; i++) blocks[i] = order == Order::kReverse ? num_blocks - 1 - i : i;
  if (order == Order::kRandom) std::shuffle(blocks.begin(), blocks.end(), random);
  std::vector<char> many_tags(unordered ? kTags * (num_blocks + 1) : 0);
  tags = unordered ? many_tags.data() : tags_of_all;
  for (size_t b : blocks) {
    grid.block = make_uint3(b % size[0], b / size[0] % size[1], b / size[0] / size[1]);
    run_block(shared_bytes, random, turns);
    if (!failure.empty()) return 1;
  }
  acquire(&end_tag);
#if defined(__SANITIZE_THREAD__)
  for (void* fiber : left_fibers) __tsan_destroy_fiber(fiber);
#endif
  for (char* memory : left_shared) free(memory);
  for (char* memory : left_stacks) munmap(memory, kStackBytes);
  left_fibers.clear();
  left_shared.clear();
  left_stacks.clear();
  return 0;
}

template <class... A>
struct BoundBody : Body {
  void (*function)(A...);
  void** arguments;
  BoundBody(void (*f)(A...), void** a) : function(f), arguments(a) {}
  template <size_t... I>
  void call(std::index_sequence<I...>) {
    function(*static_cast<std::remove_cv_t<std::remove_reference_t<A>>*>(arguments[I])...);
  }
  void operator()() override { call(std::index_sequence_for<A...>{}); }
};

template <class... A>
int launch_function(void (*f)(A...), const unsigned* size, const unsigned* block_size, size_t shared_bytes, void** arguments, size_t num_arguments) {
  failure.clear();
  if (num_arguments != sizeof...(A)) {
    fail("the kernel takes " + std::to_string(sizeof...(A)) + " arguments, it was given " + std::to_string(num_arguments));
    return 1;
  }
  BoundBody<A...> bound(f, arguments);
  return launch(bound, size, block_size, shared_bytes);
}

template <class... A>
int sizes_of(void (*)(A...), size_t* sizes) {
  const size_t all[] = {sizeof(A)..., 0};
  for (size_t i = 0; i < sizeof...(A); i++) sizes[i] = all[i];
  return sizeof...(A);
}

}  // namespace cuda_cpu

#define CUDA_CPU_VISIBLE extern "C" __attribute__((visibility("default")))
#define CUDA_CPU_EXPORT(kernel)                                                                                    \
  CUDA_CPU_VISIBLE int launch_##kernel(const unsigned* g, const unsigned* b, size_t s, void** a, size_t n) {             \
    return cuda_cpu::launch_function(kernel, g, b, s, a, n);                                                       \
  }                                                                                                                \
  CUDA_CPU_VISIBLE int sizes_##kernel(size_t* sizes) { return cuda_cpu::sizes_of(kernel, sizes); }
CUDA_CPU_VISIBLE const char* cuda_cpu_failure() { return cuda_cpu::failure.c_str(); }
CUDA_CPU_VISIBLE void cuda_cpu_configure(int order, unsigned seed, int unordered, int early_copies) {
  cuda_cpu::order = static_cast<cuda_cpu::Order>(order);
  cuda_cpu::seed = seed;
  cuda_cpu::unordered = unordered;
  cuda_cpu::early_copies = early_copies;
}

#include "intrinsics.h"
