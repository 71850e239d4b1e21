// A thread's asynchronous copies to shared memory.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "races.h"

namespace host_cuda {

// They arrive when the thread waits for their group, or at once.
class Copies {
 public:
  explicit Copies(bool at_once = false) : at_once_(at_once) {}

  // Bytes beyond `filled` are zeros.
  void start(void* to, const void* from, size_t bytes, size_t filled) {
    races::copy_begins(to, bytes);
    started_.push_back({to, from, bytes, filled});
    if (at_once_) write(started_.back());
  }
  void end_group() { groups_.push_back(std::exchange(started_, {})); }
  // Until at most this many groups are incomplete.
  void finish(size_t pending) {
    for (; groups_.size() > pending; groups_.pop_front()) {
      for (const Copy& copy : groups_.front()) {
        if (!at_once_) write(copy);
        races::copy_is_waited_for(copy.to, copy.bytes);
      }
    }
  }
  bool empty() const { return groups_.empty() && started_.empty(); }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t bytes, filled;
  };
  static void write(const Copy& copy) {
    if (copy.filled > 0) std::memcpy(copy.to, copy.from, copy.filled);
    std::memset(static_cast<char*>(copy.to) + copy.filled, 0, copy.bytes - copy.filled);
  }

  bool at_once_;
  std::deque<std::vector<Copy>> groups_;  // the newest last
  std::vector<Copy> started_;             // of the group that is not ended
};

}  // namespace host_cuda
