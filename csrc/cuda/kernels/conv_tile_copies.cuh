// What the halo kernel (conv_tiles.cu) copies to shared memory: halo tiles of the source, part by part, and
// weights, tap by tap. Pointers and limits are computed when a part begins; a step of the sum adds distances
// that the launch knows.
#pragma once

#include "cuda/kernels/conv_tiles.cuh"

namespace patchconv::kernels {

// For each place of a halo tile, where its values lie in their slice of the source, in pieces; negative for
// zeros. A tile has room for whole rounds of copies; zeros fill it up.
//
// Where a thread's entry for its first round of copies lies. The four threads of a place are of one warp.
PATCHCONV_DEVICE int first_entry(const Tiling& tiling) {
  return tiling.table + thread_index() / kChunkPieces * int{sizeof(int)};
}

// Writes the table for a group of rows of taps.
template <typename T, typename Shape>
PATCHCONV_DEVICE void write_table(const ConvCall& call, const Tiling& tiling, const Work& work,
                                  int tap_group) {
  Part part;
  part.tap_group = tap_group;
  const Halo halo = halo_of<T>(call, tiling, work, part);
  int* const entries = reinterpret_cast<int*>(shared_memory<char>() + first_entry(tiling));
  warp_barrier();  // all of the last one has been read
  for (int round = 0; round < tiling.rounds; ++round) {
    const int place = thread_index() / kChunkPieces + round * Shape::kRoundPlaces;
    const Spot spot = spot_of(call, tiling, work, halo, place);
    const int entry =
        spot.image * tiling.image_entry + spot.y * tiling.row_entry + spot.x * tiling.column_entry;
    if (thread_index() % kChunkPieces == 0) {
      entries[round * Shape::kRoundPlaces] = spot.y >= 0 && spot.x >= 0 ? entry : -1;
    }
  }
  warp_barrier();
}

template <typename T>
PATCHCONV_DEVICE void round_piece(Vec<T, kPieceOf<T>>& piece) {
#pragma unroll
  for (int i = 0; i < kPieceOf<T>; ++i) piece.at[i] = bits_float(to_tf32(piece.at[i]));
}

// The same for tiles that are gathered: each thread writes the numbers of the places whose pieces it gathers,
// in elements.
template <typename T, typename Shape>
PATCHCONV_DEVICE void write_own_table(const ConvCall& call, const Tiling& tiling, const Work& work,
                                      const Halo& halo) {
  int* const entries = reinterpret_cast<int*>(shared_memory<char>() + tiling.table);
  const int places = tiling.plan.rows * tiling.plan.columns;
  for (int place = thread_index(); place < places; place += Shape::kThreads) {
    const Spot spot = spot_of(call, tiling, work, halo, place);
    const int entry =
        spot.image * tiling.image_entry + spot.y * tiling.row_entry + spot.x * tiling.column_entry;
    entries[place] = spot.y >= 0 && spot.x >= 0 ? entry : -1;
  }
}

// Applies the bits to the pieces that this thread has copied, byte by byte.
template <typename T, typename Shape>
PATCHCONV_DEVICE void mask_tile(const ConvCall& call, const Tiling& tiling, const Work& work,
                                const Part& part, char* tile) {
  const Halo halo = halo_of<T>(call, tiling, work, part);
  for (int number = thread_index(); number < tiling.rounds * Shape::kThreads; number += Shape::kThreads) {
    const int place = number / kChunkPieces, piece = number % kChunkPieces;
    const Spot spot = spot_of(call, tiling, work, halo, place);
    const int64_t offset = spot_offset(call, halo, spot, piece * kPieceOf<T>);
    if (offset >= 0) mask_piece<T>(tile + piece_at(place, piece), call.source.bits, offset);
  }
}

// Where this thread's first piece of a tile lies in it.
PATCHCONV_DEVICE int first_piece() {
  return piece_at(thread_index() / kChunkPieces, thread_index() % kChunkPieces);
}

// Copies of halo tiles: the part whose tile is being filled. If kGather, element by element. If kRound,
// numbers are rounded to tf32.
template <typename T, bool kGather, bool kRound, typename Shape>
struct SourceCopies {
  static constexpr int kRounds = Shape::kUsualRounds;  // at once

  Part part;
  int64_t
      base;  // of a tile that is gathered: offset of the slice's first place and the chunk's first channel
  const char* from;   // this thread's piece at the slice's first place
  int channels_left;  // from this thread's first one on
  int left;           // rounds that the tile still needs, not counting those that wait for room
  int round, entry;   // the next one, and where this thread's entry of the one after it lies
  int at[kRounds];    // the next one's entries
  int to;             // where this thread's piece of it goes

  PATCHCONV_DEVICE void begin(const ConvCall& call, const Tiling& tiling, const Work& work) {
    if constexpr (!kGather) {
      const int piece = thread_index() % kChunkPieces;
      const Halo halo = halo_of<T>(call, tiling, work, part);
      from = static_cast<const char*>(call.source.data) + (halo.base + piece * kPieceOf<T>)*int{sizeof(T)};
      channels_left = halo.channels - piece * kPieceOf<T>;
      if (part.chunk == 0) write_table<T, Shape>(call, tiling, work, part.tap_group);
    } else {
      const Halo halo = halo_of<T>(call, tiling, work, part);
      base = halo.base;
      channels_left = halo.channels;
      if (tiling.gather_table) write_own_table<T, Shape>(call, tiling, work, halo);
    }
  }

  // Goes on to the next part, whose tile begins at `tile`.
  PATCHCONV_DEVICE void next(const ConvCall& call, const Tiling& tiling, const Work& work, int tile) {
    if (next_part(tiling, part)) {
      if constexpr (kGather) {
        base += kChunkOf<T> * call.source.channel;
      } else {
        from += kChunkBytes;
      }
      channels_left -= kChunkOf<T>;
    } else if (part.slice < call.lines[0].taps) {
      begin(call, tiling, work);
    }
    fill(call, tiling, tile);
  }

  PATCHCONV_DEVICE void fill(const ConvCall& call, const Tiling& tiling, int tile) {
    left = tiling.plan.buffers > 1 && part.slice < call.lines[0].taps ? tiling.rounds : 0;
    round = 0;
    to = tile;
    if constexpr (!kGather) {
      to += first_piece();
      entry = first_entry(tiling);
      load_entries();
      if (tiling.bits_in_words && left > 0) copy_words(call, tiling, tile);
    }
  }

  // Those behind a tile's last round are not used.
  PATCHCONV_DEVICE void load_entries() {
    const int* const entries = reinterpret_cast<const int*>(shared_memory<char>() + entry);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) at[i] = entries[i * Shape::kRoundPlaces];
    entry += kRounds * Shape::kRoundPlaces * int{sizeof(int)};
  }

  // The next kRounds rounds.
  PATCHCONV_DEVICE void copy(const ConvCall& call, const Tiling& tiling, const Work& work) {
    char* const shared = shared_memory<char>();
    if constexpr (kGather) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) gather(call, tiling, work, shared + to, round + i);
      round += kRounds;
    } else {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        copy_async_where(shared + to + i * Shape::kThreads * 16, from + int64_t{at[i]} * 16,
                         at[i] >= 0 && channels_left > 0);
      }
      load_entries();
      to += kRounds * Shape::kThreads * 16;
    }
    left -= kRounds;
  }

  // A round of a halo tile, element by element. Each thread takes the pieces of a place one after the other;
  // neighbouring threads take neighbouring places, since such sources are contiguous along places.
  PATCHCONV_DEVICE void gather(const ConvCall& call, const Tiling& tiling, const Work& work, char* tile,
                               int at_round) const {
    const int piece = at_round % kChunkPieces;
    const int place = at_round / kChunkPieces * Shape::kThreads + thread_index();
    if (place >= tiling.plan.rows * tiling.plan.columns) return;
    int64_t offset;
    if (tiling.gather_table) {
      offset = reinterpret_cast<const int*>(shared_memory<char>() + tiling.table)[place];
    } else {
      Halo halo = halo_of<T>(call, tiling, work, part);
      halo.base = 0;
      offset = spot_offset(call, halo, spot_of(call, tiling, work, halo, place), 0);
    }
    const int channels = offset < 0 ? 0 : channels_left - piece * kPieceOf<T>;
    offset += base + piece * kPieceOf<T> * call.source.channel;
    auto values = gathered_piece<T>(call.source, offset, channels);
    if constexpr (kRound) round_piece<T>(values);
    store_whole(tile + piece_at(place, piece), values);
  }

  // The words of bits of a tile. A warp copies those of the places whose pieces it copies.
  PATCHCONV_DEVICE void copy_words(const ConvCall& call, const Tiling& tiling, int tile) const {
    const int mine = thread_index() / kChunkPieces, piece = thread_index() % kChunkPieces;
    const int64_t first = (from - static_cast<const char*>(call.source.data)) / int{sizeof(T)} / 32;
    const char* const bits = reinterpret_cast<const char*>(call.source.bits) + first * kWordBytes;
    const bool there = channels_left + piece * kPieceOf<T> > 0;
    char* const shared = shared_memory<char>();
    char* const words = shared + tiling.words + tile / kChunkBytes * kWordBytes;
    const int* const entries = reinterpret_cast<const int*>(shared + tiling.table);
    for (int round = piece; round < tiling.rounds; round += kChunkPieces) {
      const int place = mine + round * Shape::kRoundPlaces, entry = entries[place];
      const int64_t offset = entry < 0 ? 0 : int64_t{entry} * kPieceOf<T> / 8;
      copy_word_async_where(words + place * kWordBytes, bits + offset, entry >= 0 && there);
    }
  }

  PATCHCONV_DEVICE void copy_all(const ConvCall& call, const Tiling& tiling, const Work& work) {
    if constexpr (!kGather) {
      if (tiling.bits_in_words && tiling.plan.buffers == 1) copy_words(call, tiling, 0);
    }
    for (left = tiling.rounds; left > 0;) copy(call, tiling, work);
  }
  // At most `share` rounds.
  PATCHCONV_DEVICE void copy_some(int share, const ConvCall& call, const Tiling& tiling, const Work& work) {
    if (left <= 0) return;
    copy(call, tiling, work);
    for (int rounds = kRounds; rounds < share && left > 0; rounds += kRounds) copy(call, tiling, work);
  }
};

// Applies the bits to the pieces that this thread has copied, and rounds them, once they have arrived.
template <typename T, bool kRound, typename Shape>
PATCHCONV_DEVICE void finish_tile(const ConvCall& call, const Tiling& tiling, const Work& work,
                                  const Part& part, int tile) {
  char* const shared = shared_memory<char>();
  if (call.source.bits != nullptr && !tiling.bits_in_words) {
    mask_tile<T, Shape>(call, tiling, work, part, shared + tile);
  }
  if (!kRound && !tiling.bits_in_words) return;
  // Another thread of the warp has copied the word.
  if (tiling.bits_in_words) warp_barrier();
  char* at = shared + tile + first_piece();
  const auto* word = reinterpret_cast<const uint32_t*>(shared + tiling.words + tile / kChunkBytes * 4) +
                     thread_index() / kChunkPieces;
  const int first = (part.chunk * kChunkOf<T> + thread_index() % kChunkPieces * kPieceOf<T>) % 32;
#pragma unroll 2
  for (int round = 0; round < tiling.rounds; ++round) {
    auto piece = load_whole<Vec<T, kPieceOf<T>>>(at);
    if (tiling.bits_in_words) keep_where<T>(piece, *word >> first);
    if constexpr (kRound) round_piece<T>(piece);
    store_whole(at, piece);
    at += Shape::kThreads * 16;
    word += Shape::kRoundPlaces;
  }
}

// Copies of weights, tap by tap; zeros after the last one.
template <typename T, typename Shape>
struct WeightCopies {
  Part part;
  const char* first;                // this thread's piece of the part's first tap
  const char* from;                 // of the tap that is next
  int channels_left, outputs_left;  // from this thread's first ones on
  int there;                        // of these outputs, if any of the channels is left
  int rows_left, columns_left;      // taps
  int to;                           // in a stage

  PATCHCONV_DEVICE void begin(const ConvCall& call, const Tiling& tiling, const Work& work) {
    const ConvWeight& weight = call.weight;
    const int piece = thread_index() % kChunkPieces, output = work.output + thread_index() / kChunkPieces;
    const int64_t tap = call.lines[0].tap(part.slice) * weight.tap[0] +
                        call.lines[1].tap(part.tap_group * tiling.plan.tap_rows) * weight.tap[1] +
                        call.lines[2].tap(0) * weight.tap[2];
    const int64_t offset = work.group * weight.group + output * weight.output + tap + piece * kPieceOf<T>;
    first = from = static_cast<const char*>(weight.data) + offset * int{sizeof(T)};
    channels_left = call.sources - piece * kPieceOf<T>;
    outputs_left = call.outputs - output;
    there = channels_left > 0 ? outputs_left : 0;
    rows_left = rows_of(call, tiling, part.tap_group);
    columns_left = call.lines[2].taps;
    to = piece_at(thread_index() / kChunkPieces, piece);
  }

  PATCHCONV_DEVICE void copy(const Tiling& tiling, char* stage) const {
#pragma unroll
    for (int i = 0; i < Shape::kWeightRounds; ++i) {
      copy_async_where(stage + to + i * Shape::kThreads * 16, from + i * tiling.weight_round,
                       there > i * Shape::kRoundPlaces);
    }
  }

  // Splits what this thread has copied to a stage, once it has arrived.
  PATCHCONV_DEVICE void split(char* stage) const {
#pragma unroll
    for (int i = 0; i < Shape::kWeightRounds; ++i) {
      char* const at = stage + to + i * Shape::kThreads * 16;
      auto piece = load_whole<Vec<uint32_t, 4>>(at);
      Vec<uint32_t, 4> low;
#pragma unroll
      for (int j = 0; j < 4; ++j) split_tf32(piece.at[j], piece.at[j], low.at[j]);
      store_whole(at, piece);
      store_whole(at + Shape::kPlaneOfWeights, low);
    }
  }

  PATCHCONV_DEVICE void next(const ConvCall& call, const Tiling& tiling, const Work& work) {
    from += tiling.weight_across;
    if (--columns_left > 0) return;
    columns_left = call.lines[2].taps;
    from += tiling.weight_down;
    if (--rows_left > 0) return;
    if (next_part(tiling, part)) {
      first += kChunkBytes;
      from = first;
      channels_left -= kChunkOf<T>;
      there = channels_left > 0 ? outputs_left : 0;
      rows_left = rows_of(call, tiling, part.tap_group);
    } else if (part.slice < call.lines[0].taps) {
      begin(call, tiling, work);
    } else {
      there = 0;
    }
  }
};

}  // namespace patchconv::kernels
