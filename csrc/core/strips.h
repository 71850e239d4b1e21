// How many bytes there are while a network is computed strip by strip (patchconv_native/tiles). Of each
// value, strips keep the rows that a later strip reads. Here rows are counted, strip by strip and step by
// step, and nothing is computed: a plan of thousands of strips is looked at in milliseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace patchconv {

using RowRange = std::pair<int64_t, int64_t>;  // [first, second)

// Whether the rows that are still needed of a piece are copied, so that the piece can be let go.
inline bool copies_rest(int64_t rest, int64_t length) { return rest * 2 <= length; }

// Whether new rows are written behind a copy of the ones that are still needed, so that both are read as one.
inline bool makes_room(int64_t rest, int64_t length) { return 0 < rest && rest * 2 <= length; }

// The rows of a value that are there, in pieces, as tiles/rows.py keeps them.
class CountedRows {
 public:
  // row: bytes of one row. together: whether some rows of the value are contiguous in memory.
  explicit CountedRows(int64_t row, bool together = true) : widest(row), row_(row), together_(together) {}

  int64_t widest;  // of one row, the bytes in the widest band

  int64_t bytes() const { return bytes_; }
  int64_t end() const { return end_; }
  int64_t below() const { return below_; }
  const std::vector<int64_t>& begins() const { return begins_; }

  // Rows that follow; by how much the bytes grow.
  int64_t add(int64_t length);
  // Bytes of the memory in which these rows are written behind the ones that are still needed; 0: there is
  // none. All is one piece then.
  int64_t room(int64_t length);
  // Bytes of the copy that reading these rows makes. views: whether the function that reads them takes some
  // rows of a tensor as they are; others make a copy where these do not lie together.
  int64_t copied(int64_t low, int64_t high, bool views) const;
  // Lets go of the rows below this one: how many bytes are let go of, and how many of them are still there
  // while the rows that stay are copied.
  std::pair<int64_t, int64_t> drop(int64_t below);

 private:
  size_t pieces_begun(int64_t row) const;  // how many pieces begin at this row or before it

  int64_t row_;
  bool together_;
  int64_t end_ = 0;
  int64_t bytes_ = 0;
  int64_t below_ = 0;
  std::vector<int64_t> begins_;  // of each piece, its first row
};

constexpr int kNone = -1;  // in place of a number of rows

// What a step reads of a value.
struct StripRead {
  std::vector<RowRange> ranges;  // in each strip
  int64_t copies = 0;            // bytes that are copied for each row, besides what `rows` copies
  int rows = kNone;              // the number of what keeps the value, where reading it may copy
  int drops = kNone;             // the same, where this step is the last one of a strip that reads the value
  std::vector<int64_t> keep;     // then, after each strip, the first row that is still read
};

// One or more calls of a network that are computed row by row, one after the other.
struct StripStep {
  std::vector<RowRange> rows;  // of the result, what each strip computes
  int64_t peak = 0;            // bytes above what it is given: the result counts
  int64_t result = 0;          // bytes of the result, or of a share of a number of the whole image
  int64_t aside = 0;           // what reading and writing stored values takes
  bool asks = false;           // whether it gives such a share, and no result
  bool views = false;          // whether it takes some rows of a tensor as they are
  int room = kNone;  // what keeps the result, where it may be written behind the rows that are there
  std::vector<std::pair<int, bool>> keeps;  // what keeps the results otherwise, and whether it counts
  std::vector<StripRead> reads;
};

// The most bytes during these strips above what is there before them, and by how many more are there
// afterwards. rows: what steps have the numbers of; changed to what is there afterwards.
std::pair<int64_t, int64_t> peak_of_strips(const std::vector<StripStep>& steps,
                                           const std::vector<CountedRows*>& rows, int64_t strips);

}  // namespace patchconv
