// Paged attention of up to 16 query rows (tokens x heads of a KV head) per piece on tensor cores.
//
// | version                                                            | registers sm_90 | H200, 32 x 4k, group 8 | fp8 |
// |--------------------------------------------------------------------|-----------------|------------------------|-----|
// | this: each warp has its own tiles of 16 rows, two stages in shared | see budget_cuda.json |                        |     |
// |   memory; 8-bit tiles are widened there, as ldmatrix moves 16 bits |                 |                        |     |
//
// Scores of a tile are one 16 x 16 product, its weights stay in registers as the next product's operand. Warps
// meet once, at the end; attention.cu's merge_pieces adds up the pieces.
#include "attention.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM, GROUP, BLOCK_SIZE, ACTIVATION, STORED, SOFTCAP, BIAS specialise this file"
#endif

using Activation = Format<ACTIVATION>;
using Element = Activation::Type;
using Stored = Format<STORED>;

constexpr int kHeadDim = HEAD_DIM, kThreads = 128, kWarps = 4, kStages = 2, kRows = 16, kTile = 16;
constexpr bool kScaled = Stored::kLargest > 0.0f;
constexpr int kStoredBytes = kHeadDim * sizeof(Stored::Type), kStoredStride = kStoredBytes + 16;  // 16 more: other banks
constexpr int kWideStride = kHeadDim * 2 + 16;
constexpr int kPlaneBytes = kTile * kStoredStride, kFactorBytes = 3 * kTile * 4, kStageBytes = 2 * kPlaneBytes + kFactorBytes;
constexpr int kWideBytes = kScaled ? 2 * kTile * kWideStride : 0, kWarpBytes = kStages * kStageBytes + kWideBytes;

// What one warp copies of a tile: rows of keys, of values, and their scales and biases.
struct Source {
  const Stored::Type *keys, *values;
  const float *key_scale, *value_scale, *bias;
  const int* table;
  int num_kv_heads, kv_head, first, last;

  __device__ __forceinline__ size_t line(int row) const {
    row = min(row, last - 1);
    return (static_cast<size_t>(table[row / BLOCK_SIZE]) * BLOCK_SIZE + row % BLOCK_SIZE) * num_kv_heads + kv_head;
  }
};

__device__ __forceinline__ void copy_tile(char* stage, const Source& from, int first_row) {
  const int lane = threadIdx.x % 32;
  constexpr int kVectors = kStoredBytes / 16;
  for (int i = lane; i < kTile * kVectors; i += 32) {
    const int row = i / kVectors, byte = i % kVectors * 16;
    const size_t at = from.line(first_row + row) * kStoredBytes + byte;
    copy_async16(stage + row * kStoredStride + byte, reinterpret_cast<const char*>(from.keys) + at);
    copy_async16(stage + kPlaneBytes + row * kStoredStride + byte, reinterpret_cast<const char*>(from.values) + at);
  }
  if (kScaled || BIAS) {
    float* factors = reinterpret_cast<float*>(stage + 2 * kPlaneBytes);
    if (lane < kTile) {
      const size_t line = from.line(first_row + lane);
      if (kScaled) copy_async4(factors + lane, from.key_scale + line), copy_async4(factors + kTile + lane, from.value_scale + line);
#if BIAS
      copy_async4(factors + 2 * kTile + lane, from.bias + line);
#endif
    }
  }
}

// 8-bit codes of one plane to the activations' type; codes are exact in it.
__device__ __forceinline__ void widen(char* to, const char* from) {
  constexpr int kVectors = kStoredBytes / 16;
  for (int i = threadIdx.x % 32; i < kTile * kVectors; i += 32) {
    float x[Stored::kPerVector];
    Stored::unpack(*reinterpret_cast<const uint4*>(from + i / kVectors * kStoredStride + i % kVectors * 16), x);
    alignas(16) Element wide[Stored::kPerVector];
#pragma unroll
    for (int e = 0; e < Stored::kPerVector; e++) wide[e] = Activation::round(x[e]);
    uint4* target = reinterpret_cast<uint4*>(to + i / kVectors * kWideStride + i % kVectors * Stored::kPerVector * 2);
#pragma unroll
    for (int v = 0; v < Stored::kPerVector / 8; v++) target[v] = reinterpret_cast<const uint4*>(wide)[v];
  }
}

__device__ __forceinline__ unsigned pack(float low, float high) {
  const Element pair[2] = {Activation::round(low), Activation::round(high)};
  return *reinterpret_cast<const unsigned*>(pair);
}

struct State {  // of the two rows (lane / 4, and 8 below it) a thread holds
  float out[kHeadDim / 8][4], largest[2], sum[2];
};

// scores[j]: column block j; element i is row lane / 4 + (i >= 2) * 8, column 8 * j + lane % 4 * 2 + i % 2
__device__ __forceinline__ void tile_scores(float (&scores)[2][4], const char* query, const char* keys, int stride) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    unsigned a[4], b[4];
    load_matrix_x4(a, query + lane % 16 * kWideStride + (k + lane / 16 * 8) * 2);
    load_matrix_x4(b, keys + (lane % 8 + lane / 16 * 8) * stride + (k + lane / 8 % 2 * 8) * 2);
    const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_16816(Element, scores[0], a, first);
    mma_16816(Element, scores[1], a, second);
  }
}

__device__ __forceinline__ void add_values(State& state, const float (&weights)[2][4], const char* values, int stride) {
  const int lane = threadIdx.x % 32;
  const unsigned a[4] = {pack(weights[0][0], weights[0][1]), pack(weights[0][2], weights[0][3]), pack(weights[1][0], weights[1][1]), pack(weights[1][2], weights[1][3])};
#pragma unroll
  for (int n = 0; n < kHeadDim; n += 16) {
    unsigned b[4];
    load_matrix_x4_transposed(b, values + (lane % 8 + lane / 8 % 2 * 8) * stride + (n + lane / 16 * 8) * 2);
    const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_16816(Element, state.out[n / 8], a, first);
    mma_16816(Element, state.out[n / 8 + 1], a, second);
  }
}

// Turn scores into weights (values' scales multiplied in) and bring the state to the new largest scores.
__device__ __forceinline__ void soften(State& state, float (&scores)[2][4], const float* factors, const int (&oldest)[2], const int (&visible)[2], int first_row, int last_row, float scale, float softcap) {
  const int lane = threadIdx.x % 32;
  float largest[2] = {state.largest[0], state.largest[1]};
  bool valid[2][4];
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = 8 * j + lane % 4 * 2 + i % 2, row = first_row + column, half = i / 2;
      float s = scores[j][i] * scale;
      if (kScaled) s *= factors[column];
#if SOFTCAP
      s = softcap * tanhf(s / softcap);
#endif
#if BIAS
      s += factors[2 * kTile + column];
#endif
      s *= kLog2E;
      valid[j][i] = row < last_row && row < visible[half] && row >= oldest[half];
      scores[j][i] = s;
      if (valid[j][i]) largest[half] = fmaxf(largest[half], s);
    }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    for (int lanes = 1; lanes < 4; lanes *= 2) largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xFFFFFFFFu, largest[half], lanes));
    const float shrink = exp2_fast(state.largest[half] - largest[half]);
    state.largest[half] = largest[half];
    state.sum[half] *= shrink;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n++) state.out[n][2 * half] *= shrink, state.out[n][2 * half + 1] *= shrink;
  }
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float weight = valid[j][i] ? exp2_fast(scores[j][i] - largest[i / 2]) : 0.0f;
      state.sum[i / 2] += weight;
      scores[j][i] = kScaled && valid[j][i] ? weight * factors[kTile + 8 * j + lane % 4 * 2 + i % 2] : weight;
    }
}

__device__ __forceinline__ void merge_warps(State& state, float* shared, float* partial_rows, float2* partial_sums, size_t first_row, int num_rows) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float *largest = shared + kWarps * kRows * kHeadDim, *sums = largest + kWarps * kRows;
#ifndef BUG_NO_BARRIER_BEFORE_MERGE
  __syncthreads();  // the rows are written over the stages
#endif
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp * kRows + lane / 4 + half * 8;
    for (int lanes = 1; lanes < 4; lanes *= 2) state.sum[half] += __shfl_xor_sync(0xFFFFFFFFu, state.sum[half], lanes);
    if (lane % 4 == 0) largest[row] = state.largest[half], sums[row] = state.sum[half];
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n++) *reinterpret_cast<float2*>(shared + row * kHeadDim + n * 8 + lane % 4 * 2) = make_float2(state.out[n][2 * half], state.out[n][2 * half + 1]);
  }
#ifndef BUG_NO_BARRIER_IN_MERGE
  __syncthreads();
#endif
  add_up_warps<kHeadDim, kWarps, kRows>(shared, partial_rows, partial_sums, first_row, num_rows);
}

// grid: pieces, KV heads. tile_rows: rows a piece has room for; window 0: none
extern "C" __global__ void __launch_bounds__(128)
attend_tiles(const Element* __restrict__ q, long long q_stride, const Stored::Type* __restrict__ keys, const Stored::Type* __restrict__ values, const float* __restrict__ key_scale, const float* __restrict__ value_scale,
             const float* __restrict__ bias, const int* __restrict__ block_table, int table_width, const int* __restrict__ pieces, const int* __restrict__ counts, float* __restrict__ partial_rows, float2* __restrict__ partial_sums,
             float scale, float softcap, int tile_rows, int window) {
#ifndef BUG_NO_BOUND
  if (static_cast<int>(blockIdx.x) >= counts[0]) return;
#endif
  SHARED_MEMORY(memory);
  const int* piece = pieces + blockIdx.x * 8;
  const int num_rows = piece[2] * GROUP, lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
  const Source source{keys, values, key_scale, value_scale, bias, block_table + static_cast<size_t>(piece[0]) * table_width, static_cast<int>(gridDim.y), kv_head, piece[4], piece[5]};
  char* mine = memory + warp * kWarpBytes;
  char* query = memory + kWarps * kWarpBytes;
  for (int i = threadIdx.x; i < kRows * kHeadDim; i += kThreads) {
    const int row = i / kHeadDim, token = piece[1] + row / GROUP, head = kv_head * GROUP + row % GROUP;
    reinterpret_cast<Element*>(query + row * kWideStride)[i % kHeadDim] = row < num_rows ? q[token * q_stride + head * kHeadDim + i % kHeadDim] : Activation::round(0.0f);
  }
  State state = {};
  int oldest[2], visible[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = lane / 4 + half * 8;
    visible[half] = row < num_rows ? piece[3] - piece[2] + 1 + row / GROUP : 0;
    oldest[half] = window == 0 ? 0 : visible[half] - window;
    state.largest[half] = kLowest;
  }
  const int num_tiles = (source.last - source.first + kTile - 1) / kTile;
  if (warp < num_tiles) copy_tile(mine, source, source.first + warp * kTile);
  copy_async_commit();
#ifndef BUG_NO_BARRIER_AFTER_QUERY
  __syncthreads();
#endif
  for (int tile = warp, turn = 0; tile < num_tiles; tile += kWarps, turn++) {
    const char* stage = mine + turn % kStages * kStageBytes;
    if (tile + kWarps < num_tiles) copy_tile(mine + (turn + 1) % kStages * kStageBytes, source, source.first + (tile + kWarps) * kTile);
    copy_async_commit();
#ifdef BUG_SHORT_WAIT
    copy_async_wait<kStages>();
#else
    copy_async_wait<kStages - 1>();
#endif
#ifndef BUG_NO_SYNC_AFTER_COPY
    __syncwarp();  // each lane waited for its own copies only
#endif
    const char *tile_keys = stage, *tile_values = stage + kPlaneBytes;
    if (kScaled) {
      char* wide = mine + kStages * kStageBytes;
      widen(wide, tile_keys);
      widen(wide + kTile * kWideStride, tile_values);
      tile_keys = wide, tile_values = wide + kTile * kWideStride;
      __syncwarp();
    }
    constexpr int kStride = kScaled ? kWideStride : kStoredStride;
    float scores[2][4] = {};
    tile_scores(scores, query, tile_keys, kStride);
    soften(state, scores, reinterpret_cast<const float*>(stage + 2 * kPlaneBytes), oldest, visible, source.first + tile * kTile, source.last, scale, softcap);
    add_values(state, scores, tile_values, kStride);
#ifndef BUG_NO_SYNC_BEFORE_REUSE
    __syncwarp();  // the next copy goes where this tile is
#endif
  }
  copy_async_wait<0>();
  const size_t first_row = (static_cast<size_t>(piece[6]) * gridDim.y + kv_head) * tile_rows;
  merge_warps(state, reinterpret_cast<float*>(memory), partial_rows, partial_sums, first_row, num_rows);
}
