// Convolutions on the device: sums over taps (core/conv_lines.h) in up to three dimensions, and the weight's
// gradient. A convolution of fewer dimensions has leading ones of size one. No kernel allocates; tensors may
// have any strides. Half precision and float32 are summed in float32, float64 in float64.
#pragma once

#include <array>
#include <cstdint>

#include "core/conv_lines.h"
#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

// A tensor by its strides, in elements.
struct ConvTensor {
  const void* data = nullptr;
  int64_t image = 0;
  int64_t channel = 0;
  int64_t place[3] = {0, 0, 0};  // depth, row, column
  // One bit per element of the tensor's memory (core/mask.h): an element whose bit is 0 counts as zero. May
  // be null.
  const uint8_t* bits = nullptr;
};

// A weight by its strides, in elements. `output` and `source` are channels within a group.
struct ConvWeight {
  const void* data = nullptr;
  int64_t group = 0;
  int64_t output = 0;
  int64_t source = 0;
  int64_t tap[3] = {0, 0, 0};
};

// What is applied to a sum: times scale, plus bias, plus residual, then ReLU, each only if asked for.
// Computed in float32 (float64 for float64) and rounded once.
struct ConvEpilogue {
  const void* scale = nullptr;     // one per channel, float32 (float64 for float64)
  const void* bias = nullptr;      // one per channel, of the tensors' type
  const void* residual = nullptr;  // with the strides of the result
  bool relu = false;
  uint8_t* bits = nullptr;  // in the result's memory order: what ReLU passes; see conv_writes_bits()
};

// What a kernel is given of a convolution. Most kernels compute target = sums over the taps of three lines
// and the channels of a group; those of the weight's gradient compute
// weight[output, source, tap] = sum over images and positions of target * source, with the lines of
// small_line(). Channels of the target are numbered group * outputs + output, those of the source
// group * sources + source.
struct ConvCall {
  ConvLine lines[3];
  PaddingMode mode = PaddingMode::kZeros;  // of the source
  int64_t images = 0;
  int groups = 1;
  int sources = 0;  // channels per group
  int outputs = 0;
  ConvTensor source;
  ConvTensor target;
  ConvWeight weight;
  ConvEpilogue epilogue;  // of sums
};

// ---------------------------------------------------------------------------------------------------------
// Plain kernels: one thread per result, any arguments. The reference on the device, and used where no other
// kernel serves.

void launch_conv_plain(Type type, const ConvCall& call, Stream stream);
// The gradient of a source that was padded with its own values, from the small grid to the big one: each
// element gathers from every position where padding repeats it. The call's lines are not read.
void launch_conv_plain_gather(Type type, const ConvDim (&dims)[3], PaddingMode mode, const ConvCall& call,
                              Stream stream);
void launch_conv_plain_weight(Type type, const ConvCall& call, Stream stream);

// ---------------------------------------------------------------------------------------------------------
// The halo kernel: a tile of the source with its halo lies in shared memory for all taps of a group of rows;
// products by tensor cores. Types kHalf, kBFloat16 and kFloat. A float32 product takes three tf32 products if
// `strict`, else one.

// How a launch is cut into tiles. Made for whole lines, so that pieces of a line are summed in the same
// order.
struct ConvTilePlan {
  int columns_log2 = 5;     // of a tile of 256 outputs
  int high = 0, broad = 0;  // rows and columns of them that there are at most
  int tap_rows = 1;         // rows of taps that a halo tile serves
  int rows = 0;             // of the halo tile
  int columns = 0;
  int row_step = 1;    // source rows between rows of the halo tile
  int row_pitch = 1;   // rows of the halo tile between rows of outputs
  int image_rows = 0;  // rows of the halo tile for a whole image, if rows of outputs are numbered over images
  int tile_images = 1;  // images that a tile meets at most
  int buffers = 0;      // halo tiles in shared memory; 0: no tile fits
  bool table = false;   // a number for each place of a halo tile has room there; a tile is gathered without
  bool words = false;   // so has a word of bits for each
  int shared_bytes = 0, shared_limit = 0;
};
ConvTilePlan plan_conv_tiles(Type type, bool strict, const ConvLine (&lines)[3], int outputs,
                             int shared_limit);

// The plan for the images and the lines of a call, which may be cut: where that takes less work, tiles lie
// over several images. Sums are in the same order.
ConvTilePlan plan_over_images(Type type, bool strict, const ConvTilePlan& plan, const ConvCall& call);

bool conv_tiles_grid_fits(Type type, bool strict, const ConvCall& call);

// Whether that kernel can read the weight as it is stored. If not, it needs a copy, (group, tap, output,
// source) with the sources padded with zeros to 16 bytes, of all taps of a kernel of this size; rounded to
// tf32 where one product of that is taken.
bool conv_reads_weight(Type type, bool strict, const ConvCall& call);
int64_t conv_packed_elements(Type type, const ConvCall& call, const std::array<int64_t, 3>& kernel);
// Writes the copy and returns how it is read.
ConvWeight launch_conv_pack(Type type, bool strict, const ConvCall& call,
                            const std::array<int64_t, 3>& kernel, void* packed, Stream stream);

void launch_conv_tiles(Type type, bool strict, const ConvTilePlan& plan, const ConvCall& call, Stream stream);

// Whether kernels can write the epilogue's bits to a dense target: each byte of them must belong to one
// thread. A thread of the depthwise kernel takes channels of several groups.
bool conv_writes_bits(const ConvCall& call, bool depthwise);

// ---------------------------------------------------------------------------------------------------------
// The weight's gradient by tensor cores. Each block sums a part of the images; the parts are added in order,
// so that the same plan gives the same bits. Types kHalf, kBFloat16 and kFloat. A float32 product takes three
// tf32 products if `strict`, else one.

// How a launch is cut. A block takes 64 channels of either grid, up to three neighbouring taps of a row, and
// a part of the segments. A segment is 32 positions of the small grid, in rows whose length is a power of
// two. The columns of the big grid that such a row reads form runs of columns `step` apart; within a run,
// each tap reads consecutive columns.
struct ConvWeightPlan {
  int parts = 0;          // 0: not served
  int64_t workspace = 0;  // floats
  int columns_log2 = 5;   // of a row of a segment
  int taps = 1;           // per block
  int tap_groups = 1;     // blocks per row of taps
  int runs = 1;
  int run_first[3] = {0, 0, 0};  // its first column, from the first one that the block's first tap reads
  int run_begin[3] = {0, 0, 0};  // the index of that column among the columns of all runs
  int run_columns = 0;           // of all runs
  int reach = 0;                 // the last column of all, as run_first counts
  int tap_bytes[3] = {0, 0,
                      0};  // in shared memory, from the first of all columns to the first that a tap reads
};
// `workspace_limit` is in bytes; one part is used in any case. Depends on types, sizes and limits alone, not
// on strides and addresses.
ConvWeightPlan plan_conv_weight(Type type, bool strict, const ConvCall& call, int multiprocessors,
                                int64_t workspace_limit);
void launch_conv_weight(Type type, bool strict, const ConvWeightPlan& plan, const ConvCall& call,
                        float* workspace, Stream stream);

// ---------------------------------------------------------------------------------------------------------
// Sums over the images and positions of a tensor, per channel: the bias's gradient, in the tensor's type.
struct ConvChannelSums {
  int64_t images = 0;
  int64_t sizes[3] = {1, 1, 1};
  int channels = 0;
  ConvTensor source;
  void* target = nullptr;
};
// Its workspace in floats.
int64_t conv_channel_sums_workspace(Type type, const ConvChannelSums& call);
void launch_conv_channel_sums(Type type, const ConvChannelSums& call, float* workspace, Stream stream);

// ---------------------------------------------------------------------------------------------------------
// Depthwise: one source channel per group.

bool conv_depthwise_serves(Type type, const ConvCall& call, int shared_limit);
void launch_conv_depthwise(Type type, const ConvCall& call, Stream stream);
// Its weight's gradient. The workspace is in floats and within `limit` bytes, unless a single part takes
// more; -1 if not served. Both depend on sizes alone, not on strides and addresses.
int64_t conv_depthwise_weight_workspace(Type type, const ConvCall& call, int64_t limit);
void launch_conv_depthwise_weight(Type type, const ConvCall& call, int64_t limit, float* workspace,
                                  Stream stream);

// ---------------------------------------------------------------------------------------------------------
// First layers: up to 4 source channels, one group. The taps of a kernel row form one inner dimension.

bool conv_stem_serves(Type type, const ConvCall& call, int shared_limit);
int64_t conv_stem_packed_elements(Type type, const ConvCall& call);
void launch_conv_stem(Type type, bool strict, const ConvCall& call, void* packed, Stream stream);

// ---------------------------------------------------------------------------------------------------------
// A box of a tensor, copied into all of another one. In one of them channels are contiguous, in the other
// columns.

struct ConvTurn {
  ConvTensor from, to;
  int64_t images = 0, channels = 0;
  int64_t sizes[3] = {1, 1, 1};    // of the box: depth, rows, columns
  int64_t first[3] = {0, 0, 0};    // where it begins in the source; what lies outside of the source is zero
  int64_t extents[3] = {1, 1, 1};  // of the source
};
void launch_conv_turn(int element_bytes, const ConvTurn& turn, Stream stream);

}  // namespace patchconv::kernels
