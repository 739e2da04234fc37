// CUDA's built-in functions on the CPU, as far as the kernels use them, and the tensor-core primitives.
#pragma once

#define __syncthreads() cuda_cpu::arrive("__syncthreads", __LINE__)
#define __syncwarp() cuda_cpu::exchange("__syncwarp", ~0u, 0, __LINE__, true)
#define __shfl_xor_sync(mask, value, lanes) cuda_cpu::shuffle("__shfl_xor_sync", mask, value, cuda_cpu::thread->lane ^ (lanes), __LINE__)
#define __shfl_up_sync(mask, value, lanes) cuda_cpu::shuffle("__shfl_up_sync", mask, value, std::max(0, int(cuda_cpu::thread->lane) - int(lanes)), __LINE__, cuda_cpu::thread->lane < unsigned(lanes))
#define __ballot_sync(mask, predicate) cuda_cpu::ballot(mask, predicate, __LINE__)

namespace cuda_cpu {

template <class T>
inline T shuffle(const char* operation, uint32_t mask, T value, unsigned lane, int line, bool keeps = false) {
  const Exchange& got = exchange(operation, mask, value, line);
  if (keeps) return value;
  if (lane > 31 || !(got.mask >> lane & 1)) {
    fail(at(operation, line) + ": lane " + std::to_string(thread->lane) + " reads lane " + std::to_string(lane) + ", which takes no part");
    return value;
  }
  return taken<T>(got, lane);
}

inline uint32_t ballot(uint32_t mask, int predicate, int line) {
  const Exchange& got = exchange("__ballot_sync", mask, int(predicate != 0), line);
  uint32_t bits = 0;
  for (unsigned i = 0; i < 32; i++)
    if (got.mask >> i & 1 && taken<int>(got, i)) bits |= 1u << i;
  return bits;
}

// Relaxed, as on the device: it orders nothing else.
template <class T, class F>
inline T update(T* where, F change) {
  T before, after;
  __atomic_load(where, &before, __ATOMIC_RELAXED);
  do after = change(before);
  while (!__atomic_compare_exchange(where, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace cuda_cpu

template <class T, class U>
inline T atomicAdd(T* where, U value) { return cuda_cpu::update(where, [=](T v) { return T(v + value); }); }
inline void __threadfence() {
  static char tag;
  cuda_cpu::acquire(&tag);
  cuda_cpu::release(&tag);
}

inline uint32_t __float_as_uint(float x) { return cuda_cpu::bits_of<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return cuda_cpu::bits_of<float>(x); }
inline double __longlong_as_double(long long x) { return cuda_cpu::bits_of<double>(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
using std::isfinite;
using std::isnan;
using std::max;
using std::min;

// ---- the primitives that are PTX on the device; headrace.backends.cupy_raw's primitives.cuh has that half

inline float exp2_fast(float x) { return exp2f(x); }
inline uint4 load16(const void* from) { return *static_cast<const uint4*>(from); }

// An asynchronous copy lands as late as it may, at the wait, or at once: both are legal on the device.
inline void queue_copy(const cuda_cpu::Copy& copy) {
  cuda_cpu::Untracked untracked;
  cuda_cpu::thread->copies.push_back(copy);
}
inline void land(const cuda_cpu::Copy& copy) {
  if (copy.is_short) *static_cast<float*>(copy.to) = *static_cast<const float*>(copy.from);
  else *static_cast<uint4*>(copy.to) = *static_cast<const uint4*>(copy.from);
}
inline void copy_async4(void* to, const void* from) {
  const cuda_cpu::Copy copy{to, from, false, true};
  if (cuda_cpu::early_copies) land(copy);
  queue_copy(copy);
}
inline void copy_async16(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) cuda_cpu::fail("cp.async: an address is not a multiple of 16");
  const cuda_cpu::Copy copy{to, from, false, false};
  if (cuda_cpu::early_copies) land(copy);
  queue_copy(copy);
}
inline void copy_async_commit() { queue_copy({nullptr, nullptr, true, false}); }
// Take the next copy that must land so that at most `allowed` groups stay under way.
inline bool next_copy(int allowed, cuda_cpu::Copy* copy) {
  cuda_cpu::Untracked untracked;
  auto& queue = cuda_cpu::thread->copies;
  for (;;) {
    int groups = 0;
    for (const auto& one : queue) groups += one.ends_group;
    if (groups <= allowed) return false;
    *copy = queue.front();
    queue.pop_front();
    if (!copy->ends_group) return true;
  }
}
template <int kGroups>
inline void copy_async_wait() {
  cuda_cpu::Copy copy;
  while (next_copy(kGroups, &copy))
    if (!cuda_cpu::early_copies) land(copy);
}

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
#define load_matrix_x4(registers, row) cuda_cpu_load_matrix<false>(__LINE__, registers, row)
#define load_matrix_x4_transposed(registers, row) cuda_cpu_load_matrix<true>(__LINE__, registers, row)
template <bool kTransposed>
inline void cuda_cpu_load_matrix(int line, uint32_t (&registers)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) cuda_cpu::fail(cuda_cpu::at("ldmatrix", line) + ": a row's address is not a multiple of 16");
  const cuda_cpu::Exchange& got = cuda_cpu::exchange("ldmatrix", ~0u, row, line);
  const unsigned lane = cuda_cpu::thread->lane, major = lane / 4, minor = lane % 4 * 2;
  for (int i = 0; i < 4; i++) {
    uint16_t pair[2];
    for (unsigned j = 0; j < 2; j++) {
      const unsigned r = kTransposed ? minor + j : major, c = kTransposed ? major : minor + j;
      pair[j] = cuda_cpu::taken<const uint16_t*>(got, i * 8 + r)[c];
    }
    memcpy(&registers[i], pair, 4);
  }
}

struct CudaCpuFragments { uint32_t a[4], b[2]; };
#define mma_16816(Element, d, a, b) cuda_cpu_mma<Element>(__LINE__, d, a, b)
template <class Element>
inline void cuda_cpu_mma(int line, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  CudaCpuFragments mine;
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b, sizeof mine.b);
  const cuda_cpu::Exchange& got = cuda_cpu::exchange("mma.sync", ~0u, mine, line);
  const unsigned lane = cuda_cpu::thread->lane;
  auto element = [](uint32_t pair, int high) {
    return float(cuda_cpu::bits_of<Element>(uint16_t(high ? pair >> 16 : pair)));
  };
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + (i & 1);
    for (int k = 0; k < 16; k++) {
      const auto of_a = cuda_cpu::taken<CudaCpuFragments>(got, row % 8 * 4 + k % 8 / 2);
      const auto of_b = cuda_cpu::taken<CudaCpuFragments>(got, column * 4 + k % 8 / 2);
      d[i] += element(of_a.a[(row >= 8) + 2 * (k >= 8)], k & 1) * element(of_b.b[k >= 8], k & 1);
    }
  }
}
