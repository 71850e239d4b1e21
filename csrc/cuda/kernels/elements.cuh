// Passes over every element of dense tensors: which thread reads what. A block takes a tile of kTile
// elements. A thread takes kVectors pieces of 16 bytes of it, placed so that the pieces of a warp are
// contiguous. A piece that is incomplete, or not aligned to 16 bytes, is read element by element.
#pragma once

#include "cuda/kernels/arch.cuh"

namespace patchconv::kernels {

constexpr int kElementThreads = 256;

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vec {
  T at[kCount];
};

// `p` must be aligned to V: else it is an error, on the device and under UndefinedBehaviorSanitizer.
template <typename V>
PATCHCONV_DEVICE V load_whole(const void* p) {
  return *static_cast<const V*>(p);
}
template <typename V>
PATCHCONV_DEVICE void store_whole(void* p, const V& v) {
  *static_cast<V*>(p) = v;
}

template <typename T>
struct Elements {
  static constexpr int kCount = 16 / sizeof(T);  // per piece
  static constexpr int kVectors = 4;
  static constexpr int kTile = kElementThreads * kVectors * kCount;
  using Piece = Vec<T, kCount>;

  static int64_t tiles(int64_t count) { return (count + kTile - 1) / kTile; }

  // First element of this thread's piece `number`.
  static PATCHCONV_DEVICE int64_t first(int number) {
    return block_x() * kTile + (number * kElementThreads + thread_index()) * kCount;
  }

  // How many of the piece at `begin` are below `count`.
  static PATCHCONV_DEVICE int left(int64_t begin, int64_t count) {
    const int64_t left = count - begin;
    return left <= 0 ? 0 : left < kCount ? static_cast<int>(left) : kCount;
  }

  // `aligned`: every piece begins at a multiple of 16 bytes. Elements past `count` are zeros.
  static PATCHCONV_DEVICE Piece load(const T* x, int64_t begin, int64_t count, bool aligned) {
    if (aligned && begin + kCount <= count) return load_whole<Piece>(x + begin);
    Piece piece;
#pragma unroll
    for (int i = 0; i < kCount; ++i) piece.at[i] = begin + i < count ? x[begin + i] : from_float<T>(0);
    return piece;
  }

  static PATCHCONV_DEVICE void store(T* y, const Piece& piece, int64_t begin, int64_t count, bool aligned) {
    if (aligned && begin + kCount <= count) return store_whole(y + begin, piece);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (begin + i < count) y[begin + i] = piece.at[i];
    }
  }
};

inline bool aligned_to_pieces(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Calls use(T()) for a type's T: not float64, which few kernels serve.
template <typename Use>
void with_type(Type type, Use use) {
  switch (type) {
    case Type::kFloat:
      return use(float());
    case Type::kHalf:
      return use(Half());
    case Type::kBFloat16:
      return use(BFloat16());
    case Type::kDouble:
      throw LaunchError("a kernel that does not serve float64");
  }
}

}  // namespace patchconv::kernels
