// A small test framework: CHECK and CHECK_EQ count the checks that pass and print those that fail.
#pragma once

#include <cstdio>
#include <sstream>
#include <string>

namespace check {

inline int passed = 0;
inline int failed = 0;

inline void that(bool holds, const char* file, int line, const char* text, const std::string& detail) {
  holds ? ++passed : ++failed;
  if (!holds)
    std::printf("%s:%d: failed: %s%s%s\n", file, line, text, detail.empty() ? "" : ": ", detail.c_str());
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* file, int line, const char* text) {
  std::ostringstream detail;
  detail << a << " != " << b;
  that(a == b, file, line, text, detail.str());
}

inline int report() {
  std::printf("%d checks passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition) check::that((condition), __FILE__, __LINE__, #condition, "")
#define CHECK_EQ(a, b) check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)
