// What the halo kernel (conv_tiles.cu) serves, and how it cuts a convolution into tiles.
#include <algorithm>
#include <numeric>

#include "cuda/kernels/conv_tiles.cuh"

namespace patchconv::kernels {

namespace {

int piece_of(Type type) { return type == Type::kFloat ? 4 : 8; }

// Shared memory of a plan whose tile has a size.
int64_t bytes_of(const ConvTilePlan& plan, bool strict, bool wide) {
  const int64_t places = roomy(plan.rows, plan.columns);
  const int stage = wide ? Wide::kStageOfWeights : strict ? Strict::kStageOfWeights : Narrow::kStageOfWeights;
  int64_t bytes = plan.buffers * places * kChunkBytes + kStages * stage;
  if (plan.words) bytes += plan.buffers * places * kWordBytes;
  if (plan.table) bytes += (places + Wide::kRoundPlaces) * kWordBytes;
  return std::max<int64_t>(bytes, (wide || strict ? 8 : 4) * kStageBytes);
}

// Fits as much into shared memory as it can with this number of buffers; sets shared_bytes, 0 if nothing
// fits.
void fit(ConvTilePlan& plan, bool strict, bool wide, int64_t shared_limit) {
  for (const int extras : {2, 1, 0}) {
    plan.table = extras > 0;
    plan.words = extras > 1;
    const int64_t bytes = bytes_of(plan, strict, wide);
    plan.shared_bytes = bytes <= shared_limit ? static_cast<int>(bytes) : 0;
    if (plan.shared_bytes > 0) return;
  }
}

// The best of the plans that are considered.
struct Choice {
  bool strict, wide;
  const ConvLine &y, &x;
  int shared_limit;
  ConvTilePlan best = {};
  double least = 0;

  // What a plan costs: tiles, times the places that each computes and reads. Reads that nothing in the block
  // overlaps count twice, those that only one tap does half as much more. Blocks of four warps cost half
  // where two share a multiprocessor, whose memory is a little more than a block may have; registers keep
  // blocks of eight warps alone.
  double cost_of(const ConvTilePlan& plan, int64_t tiles) const {
    constexpr int64_t kReserved = 1024;  // per block
    auto reads = static_cast<double>(round_up(std::max(y.taps, 1), plan.tap_rows) * plan.rows * plan.columns);
    if (plan.buffers == 1 || !plan.table) {
      reads *= 2;
    } else if (plan.buffers == 2 && fewest_taps(plan, y, x) <= 1) {
      reads *= 1.5;
    }
    const double work = static_cast<double>(tiles) * (kPlaces * std::max(y.taps * x.taps, 1) + reads);
    const bool pairs = 2 * (plan.shared_bytes + kReserved) <= shared_limit + kReserved;
    return !wide && !strict && !pairs ? 2 * work : work;
  }

  // A plan whose tile has a size, with every number of buffers that fits.
  void consider(ConvTilePlan plan, int64_t tiles) {
    if (int64_t{plan.rows} * plan.columns * kChunkBytes > shared_limit) return;
    plan.shared_limit = shared_limit;
    for (const int buffers : {3, 2, 1}) {
      plan.buffers = buffers;
      if (buffers == 3 && fewest_taps(plan, y, x) > 1) continue;  // two are enough
      fit(plan, strict, wide, shared_limit);
      if (plan.shared_bytes == 0) continue;
      const double cost = cost_of(plan, tiles);
      if (best.buffers > 0 && cost >= least) continue;
      best = plan;
      least = cost;
    }
  }
};

int64_t reach(const ConvLine& line, int64_t count, int64_t taps) {
  return (count - 1) * line.step + (taps - 1) * line.distance + 1;
}

int64_t tiles_of(int columns_log2, int64_t rows, const ConvLine& x) {
  return round_up(rows, kPlaces >> columns_log2) * round_up(x.count, int64_t{1} << columns_log2);
}

// A plan for tiles of 2^columns_log2 columns whose first `high` rows are of one image; none if the halo tile
// is far too large.
ConvTilePlan shaped(int columns_log2, int64_t high, int tap_rows, const ConvLine& y, const ConvLine& x,
                    int shared_limit) {
  ConvTilePlan plan;
  const int64_t broad = std::min(int64_t{1} << columns_log2, std::max<int64_t>(x.count, 1));
  const int64_t columns = std::max<int64_t>(reach(x, broad, std::max(x.taps, 1)), 2);
  const int64_t rows = tap_rows == 1 ? high : reach(y, high, tap_rows);
  if (rows * columns * kChunkBytes > shared_limit) return plan;
  plan.columns_log2 = columns_log2;
  plan.high = static_cast<int>(high);
  plan.broad = static_cast<int>(broad);
  plan.tap_rows = tap_rows;
  plan.rows = static_cast<int>(rows);
  plan.columns = static_cast<int>(columns);
  plan.row_step = tap_rows == 1 ? static_cast<int>(y.step) : 1;
  plan.row_pitch = tap_rows == 1 ? 1 : static_cast<int>(y.step);
  return plan;
}

// The same for tiles whose rows are numbered over images. Between the rows of two images lie as many more as
// the taps of one reach beyond the next one.
ConvTilePlan shaped_over_images(int columns_log2, int64_t images, int tap_rows, const ConvLine& y,
                                const ConvLine& x, int shared_limit) {
  constexpr int64_t kMost = 1 << 14;  // keeps to the limits of quotient()
  const int64_t most_rows = kPlaces >> columns_log2, high = std::min(most_rows, images * y.count);
  ConvTilePlan plan = shaped(columns_log2, high, tap_rows, y, x, shared_limit);
  const int64_t span = tap_rows == 1 ? 1 : reach(y, 1, tap_rows);
  const int64_t image_rows = (y.count - 1) * plan.row_pitch + span;
  if (plan.rows == 0 || image_rows > kMost || plan.row_pitch > kMost || y.count > kMost) return {};
  // Tiles begin at multiples of their rows.
  const int64_t last_begin = y.count - std::gcd(y.count, most_rows);
  const int64_t more = high < most_rows ? images - 1 : (last_begin + most_rows - 1) / y.count;
  const int64_t rows = plan.rows + more * std::max<int64_t>(span - plan.row_pitch, 0);
  if (rows > kMost) return {};
  plan.rows = static_cast<int>(rows);
  plan.image_rows = static_cast<int>(image_rows);
  plan.tile_images = static_cast<int>(std::min(more + 1, images));
  return plan;
}

}  // namespace

ConvTilePlan plan_conv_tiles(Type type, bool strict, const ConvLine (&lines)[3], int outputs,
                             int shared_limit) {
  if (type == Type::kDouble) return {};
  const ConvLine &y = lines[1], &x = lines[2];
  for (const ConvLine& line : lines) {  // coordinates in a tile, and shifts, are 32-bit
    if (line.source >= 1 << 30 || line.count >= 1 << 30 || line.last() >= 1 << 30) return {};
    if (line.step >= 1 << 15 || line.distance >= 1 << 15 || line.first <= -(1 << 30)) return {};
  }
  strict = strict && type == Type::kFloat;
  Choice choice{strict, is_wide(strict, outputs), y, x, shared_limit};
  for (int log2 = 5; log2 >= 3; --log2) {
    const int64_t high = std::min<int64_t>(kPlaces >> log2, std::max<int64_t>(y.count, 1));
    for (int tap_rows = std::max(y.taps, 1); tap_rows >= 1;
         tap_rows = tap_rows > 1 ? (tap_rows + 1) / 2 : 0) {
      const ConvTilePlan plan = shaped(log2, high, tap_rows, y, x, shared_limit);
      if (plan.rows > 0) choice.consider(plan, tiles_of(log2, y.count, x));
    }
  }
  return choice.best;
}

ConvTilePlan plan_over_images(Type type, bool strict, const ConvTilePlan& plan, const ConvCall& call) {
  const ConvLine &y = call.lines[1], &x = call.lines[2];
  if (call.images < 2 || y.count < 1 || x.count < 1) return plan;
  strict = strict && type == Type::kFloat;
  Choice choice{strict, is_wide(strict, call.outputs), y, x, plan.shared_limit};
  choice.best = plan;
  choice.least = choice.cost_of(plan, call.images * tiles_of(plan.columns_log2, y.count, x));
  for (int log2 = 5; log2 >= 3; --log2) {
    const ConvTilePlan over = shaped_over_images(log2, call.images, plan.tap_rows, y, x, plan.shared_limit);
    if (over.rows > 0) choice.consider(over, tiles_of(log2, call.images * y.count, x));
  }
  return choice.best;
}

bool conv_tiles_grid_fits(Type type, bool strict, const ConvCall& call) {
  const int outputs =
      is_wide(strict && type == Type::kFloat, call.outputs) ? Wide::kOutputs : Narrow::kOutputs;
  return call.groups * round_up(call.outputs, outputs) <= kMostBlocksDown;
}

bool conv_reads_weight(Type type, bool strict, const ConvCall& call) {
  if (type == Type::kFloat && !strict) return false;
  const int piece = piece_of(type);
  const ConvWeight& w = call.weight;
  return w.source == 1 && call.sources % piece == 0 && aligned_to_pieces(w.data) && w.output % piece == 0 &&
         w.tap[0] % piece == 0 && w.tap[1] % piece == 0 && w.tap[2] % piece == 0 &&
         (call.groups == 1 || w.group % piece == 0);
}

bool conv_writes_bits(const ConvCall& call, bool depthwise) {
  const ConvTensor& target = call.target;
  const int channels = call.groups * call.outputs;
  const ConvLine& x = call.lines[2];
  if (target.channel == 1) return channels % 8 == 0 && (depthwise || call.outputs % 8 == 0);
  return target.place[2] == 1 && x.out_step == 1 && x.out_first % 8 == 0 && x.count % 8 == 0 &&
         target.place[1] % 8 == 0;
}

}  // namespace patchconv::kernels
