#include "core/strips.h"

#include <algorithm>

namespace patchconv {

size_t CountedRows::pieces_begun(int64_t row) const {
  return std::upper_bound(begins_.begin(), begins_.end(), row) - begins_.begin();
}

int64_t CountedRows::add(int64_t length) {
  begins_.push_back(end_);
  end_ += length;
  bytes_ += length * row_;
  return length * row_;
}

int64_t CountedRows::room(int64_t length) {
  const int64_t begin = begins_.empty() ? end_ : std::max(below_, begins_.front());
  if (!makes_room(end_ - begin, length)) return 0;
  begins_.assign(1, begin);
  end_ += length;
  bytes_ = (end_ - begin) * row_;
  return bytes_;
}

int64_t CountedRows::copied(int64_t low, int64_t high, bool views) const {
  const size_t piece = pieces_begun(low);
  const int64_t end = piece < begins_.size() ? begins_[piece] : end_;
  const int64_t begin = piece > 0 ? begins_[piece - 1] : low;
  const bool at_once = high <= end && (views || together_ || (low == begin && high == end));
  return at_once ? 0 : (high - low) * row_;
}

std::pair<int64_t, int64_t> CountedRows::drop(int64_t below) {
  const int64_t before = bytes_;
  int64_t held = 0;
  below_ = below;
  const size_t begun = pieces_begun(below);
  size_t gone = begun > 0 ? begun - 1 : 0;  // whole pieces before the one that holds `below`
  if (end_ <= below) {
    gone = begins_.size();
  } else if (!begins_.empty() && begins_[gone] < below) {
    const int64_t begin = begins_[gone];
    const int64_t end = gone + 1 < begins_.size() ? begins_[gone + 1] : end_;
    if (copies_rest(end - below, end - begin)) {
      begins_[gone] = below;
      held = (end - begin) * row_;
    }
  }
  begins_.erase(begins_.begin(), begins_.begin() + static_cast<std::ptrdiff_t>(gone));
  bytes_ = begins_.empty() ? 0 : (end_ - begins_.front()) * row_;
  return {before - bytes_, held};
}

namespace {

class Strips {
 public:
  explicit Strips(const std::vector<CountedRows*>& rows) : rows_(rows) {}

  void run(const StripStep& step, size_t strip) {
    if (step.rows[strip].first < step.rows[strip].second) compute(step, strip);
    for (const StripRead& read : step.reads) {
      if (read.drops == kNone) continue;
      const auto [gone, beside] = rows_[read.drops]->drop(read.keep[strip]);
      there -= gone;
      most = std::max(most, there + beside);
    }
  }

  int64_t most = 0;
  int64_t there = 0;

 private:
  void compute(const StripStep& step, size_t strip) {
    const int64_t length = step.rows[strip].second - step.rows[strip].first;
    int64_t copied = 0;
    for (const StripRead& read : step.reads) {
      const auto [low, high] = read.ranges[strip];
      copied += (high - low) * read.copies;
      if (read.rows != kNone) copied += rows_[read.rows]->copied(low, high, step.views);
    }
    most = std::max(most, there + copied + std::max(step.peak, step.result + step.aside));
    if (step.asks) {
      there += 2 * step.result;  // joined at the end
      return;
    }
    if (step.room != kNone) {
      const int64_t before = rows_[step.room]->bytes();
      if (const int64_t room = rows_[step.room]->room(length)) {
        most = std::max(most, there + copied + step.result + room);
        there += room - before;
        return;
      }
    }
    for (const auto& [number, counts] : step.keeps) {
      const int64_t more = rows_[number]->add(length);
      if (counts) there += more;
    }
  }

  const std::vector<CountedRows*>& rows_;
};

}  // namespace

std::pair<int64_t, int64_t> peak_of_strips(const std::vector<StripStep>& steps,
                                           const std::vector<CountedRows*>& rows, int64_t strips) {
  Strips all(rows);
  for (int64_t strip = 0; strip < strips; ++strip) {
    for (const StripStep& step : steps) all.run(step, static_cast<size_t>(strip));
  }
  return {all.most, all.there};
}

}  // namespace patchconv
