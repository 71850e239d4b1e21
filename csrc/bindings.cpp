// The Python module patchconv_native._C: build facts, settings, the tile planner, and a short way into the
// dispatcher. The only pybind11 file. It defines no operators: loading the library registers them with
// torch's dispatcher, where Python finds them as torch.ops.patchconv.*. A call through torch.ops parses its
// arguments against a schema, which takes longer than the other overhead of a small convolution; conv() and
// conv_transpose() below make the same call with typed arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "core/build_facts.h"
#include "core/conv_rules.h"
#include "core/settings.h"
#include "core/strips.h"
#include "memory/census.h"
#include "ops/conv.h"
#include "ops/conv_explain.h"

namespace py = pybind11;

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

py::dict built_with() {
  py::dict facts;
  facts["torch"] = TORCH_VERSION;
  facts["cuda"] = py::none();
  facts["archs"] = py::none();
  facts["compiler"] = compiler();
  if (const auto& cuda = patchconv::cuda_facts()) {
    const int version = cuda->runtime_version;
    facts["cuda"] = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    facts["archs"] = cuda->arch_list;
  }
  return facts;
}

py::tuple own_settings() {
  const patchconv::OwnSettings& own = patchconv::own_settings();
  py::object backend = py::none();
  if (own.backend) backend = py::str(patchconv::backend_name(*own.backend));
  return py::make_tuple(own.workspace_limit, backend, own.recompute);
}

void set_own_settings(std::optional<int64_t> workspace_limit, const std::optional<std::string>& backend,
                      std::optional<bool> recompute) {
  patchconv::OwnSettings own{.workspace_limit = workspace_limit, .recompute = recompute};
  if (backend) own.backend = patchconv::parse_backend(*backend);
  patchconv::set_own_settings(own);
}

py::dict path_dict(const patchconv::PathRecord& record) {
  py::dict d;
  d["op"] = record.op;
  d["pass"] = record.pass;
  d["path"] = record.kernel != nullptr ? "native" : record.tiled ? "tiled" : "stock";
  d["kernel"] = record.kernel != nullptr ? py::object(py::str(record.kernel)) : py::none();
  d["tiles"] = std::vector<int64_t>(record.pieces.begin(), record.pieces.begin() + record.dims);
  d["batch_step"] = record.batch_step;
  d["count"] = record.tiles;
  d["views"] = record.views;
  return d;
}

at::OptionalIntArrayRef optional_ref(const std::optional<std::vector<int64_t>>& list) {
  return list.has_value() ? at::OptionalIntArrayRef(*list) : std::nullopt;
}

py::dict plan(const std::vector<int64_t>& input, const std::vector<int64_t>& weight,
              const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
              const std::vector<int64_t>& output_padding, const std::vector<int64_t>& dilation,
              int64_t groups, bool transposed, const std::string& padding_mode,
              const std::optional<std::vector<int64_t>>& splits, const std::vector<int64_t>& input_stride,
              const std::vector<int64_t>& weight_stride, const std::string& dtype,
              const std::string& weight_dtype, const std::string& device, const std::string& pass) {
  const auto dims = static_cast<int>(weight.size()) - 2;
  if (dims < 1 || dims > 3) {
    throw py::value_error("explain: expected weight to have 3, 4 or 5 dimensions, got " +
                          std::to_string(weight.size()));
  }
  const patchconv::ConvSpec spec =
      transposed
          ? patchconv::transposed_spec(dims, stride, padding, output_padding, groups, dilation,
                                       optional_ref(splits))
          : patchconv::conv_spec(dims, stride, padding, dilation, groups, padding_mode, optional_ref(splits));
  const patchconv::ConvExplanation e =
      patchconv::explain_conv(spec, patchconv::stand_in(input, input_stride, dtype),
                              patchconv::stand_in(weight, weight_stride, weight_dtype), device, pass);
  py::dict d;
  d["path"] = e.kernel ? "native" : e.plan.tiled ? "tiled" : "stock";
  d["kernel"] = e.kernel ? py::object(py::str(e.kernel.name)) : py::none();
  d["tiles"] = e.tiles;
  d["batch_step"] = e.plan.batch_step;
  d["halo_percent"] = e.plan.halo_percent;
  d["workspace_bytes"] = e.plan.tile_bytes;
  d["stock_workspace_bytes"] = e.plan.whole_bytes;
  d["output_size"] = e.output_size;
  d["reason"] = e.reason;
  return d;
}

// Rules are dicts, as in patchconv_native/conv_rules.json.

[[noreturn]] void bad_rule(size_t number, const std::string& expected, const py::handle& got) {
  throw py::value_error("conv rule " + std::to_string(number) + ": expected " + expected + ", got " +
                        py::repr(got).cast<std::string>());
}

int64_t rule_end(const py::handle& end, size_t number, const std::string& name, const py::handle& range) {
  if (end.is_none()) return -1;
  if (!py::isinstance<py::int_>(end) || py::isinstance<py::bool_>(end)) {
    bad_rule(number, name + " to be [least, most], each a number or None", range);
  }
  return end.cast<int64_t>();
}

patchconv::ConvRange rule_range(const py::handle& value, size_t number, const std::string& name) {
  const bool pair = py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value);
  if (!pair || py::len(value) != 2)
    bad_rule(number, name + " to be [least, most], each a number or None", value);
  const auto ends = py::reinterpret_borrow<py::sequence>(value);
  return {rule_end(ends[0], number, name, value), rule_end(ends[1], number, name, value)};
}

patchconv::ConvRule rule_of(const py::handle& given, size_t number) {
  if (!py::isinstance<py::dict>(given)) bad_rule(number, "a dict", given);
  patchconv::ConvRule rule;
  bool decides = false;
  const std::pair<const char*, patchconv::ConvRange patchconv::ConvRule::*> ranges[] = {
      {"groups", &patchconv::ConvRule::groups},   {"sources", &patchconv::ConvRule::sources},
      {"outputs", &patchconv::ConvRule::outputs}, {"taps", &patchconv::ConvRule::taps},
      {"stride", &patchconv::ConvRule::stride},   {"places", &patchconv::ConvRule::places}};
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(given)) {
    const auto name = py::str(key).cast<std::string>();
    const auto* range = std::find_if(std::begin(ranges), std::end(ranges),
                                     [&](const auto& one) { return name == one.first; });
    if (range != std::end(ranges)) {
      rule.*(range->second) = rule_range(value, number, name);
    } else if (name == "native") {
      if (!py::isinstance<py::bool_>(value)) bad_rule(number, "native to be True or False", value);
      rule.native = value.cast<bool>();
      decides = true;
    } else if (name == "layout") {
      const auto layout = py::str(value).cast<std::string>();
      if (layout != "NCHW" && layout != "channels_last") {
        bad_rule(number, "layout to be 'NCHW' or 'channels_last'", value);
      }
      rule.channels_last = layout == "channels_last";
    } else if (name == "pass" || name == "dtype") {
      if (!py::isinstance<py::str>(value) || py::len(value) == 0)
        bad_rule(number, name + " to be a name", value);
      (name == "pass" ? rule.pass : rule.dtype) = value.cast<std::string>();
    } else {
      bad_rule(number, "native, pass, dtype, layout, groups, sources, outputs, taps, stride or places", key);
    }
  }
  if (!decides) bad_rule(number, "native to be given", given);
  return rule;
}

void set_conv_rules(int arch, const std::optional<py::list>& given) {
  std::optional<std::vector<patchconv::ConvRule>> rules;
  if (given) {
    rules.emplace();
    for (const auto& one : *given) rules->push_back(rule_of(one, rules->size()));
  }
  patchconv::set_conv_rules(arch, std::move(rules));
}

bool prefers_native_kernel(int arch, const std::string& pass, const std::string& dtype,
                           const std::string& layout, int64_t groups, int64_t sources, int64_t outputs,
                           int64_t taps, int64_t stride, int64_t places) {
  if (layout != "NCHW" && layout != "channels_last") {
    throw py::value_error("prefers_native_kernel: expected layout to be 'NCHW' or 'channels_last', got '" +
                          layout + "'");
  }
  return patchconv::prefers_native_kernel(
      arch, {pass, dtype, layout == "channels_last", groups, sources, outputs, taps, stride, places});
}

at::Tensor conv(int dims, const at::Tensor& input, const at::Tensor& weight,
                const std::optional<at::Tensor>& bias, const std::vector<int64_t>& stride,
                const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, int64_t groups,
                const std::string& padding_mode, const std::optional<std::vector<int64_t>>& splits) {
  return patchconv::call_conv(
      patchconv::conv_spec(dims, stride, padding, dilation, groups, padding_mode, optional_ref(splits)),
      input, weight, bias);
}

at::Tensor conv_given(int dims, const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const std::vector<int64_t>& stride,
                      const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
                      int64_t groups, const std::string& padding_mode, const at::Tensor& output) {
  return patchconv::conv_given(
      patchconv::conv_spec(dims, stride, padding, dilation, groups, padding_mode, std::nullopt), input,
      weight, bias, output);
}

at::Tensor conv_transpose(int dims, const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const std::vector<int64_t>& stride,
                          const std::vector<int64_t>& padding, const std::vector<int64_t>& output_padding,
                          int64_t groups, const std::vector<int64_t>& dilation,
                          const std::optional<std::vector<int64_t>>& splits) {
  return patchconv::call_conv(patchconv::transposed_spec(dims, stride, padding, output_padding, groups,
                                                         dilation, optional_ref(splits)),
                              input, weight, bias);
}

// The events of a census: one list of numbers per field, and the names of the operators.
py::dict census_events(patchconv::Census& census) {
  const patchconv::CensusEvents events = census.events();
  py::dict d;
  d["kind"] = events.kind;
  d["time"] = events.time;
  d["bytes"] = events.bytes;
  d["id"] = events.id;
  d["op"] = events.op;
  d["names"] = events.names;
  return d;
}

using Ends = std::pair<int64_t, int64_t>;  // of a range: [first, second)

patchconv::ConvDim geometry_dim(int64_t big, int64_t small, int64_t kernel, int64_t stride, int64_t dilation,
                                int64_t pad_before) {
  return {big, small, kernel, stride, dilation, pad_before, 0};
}

void bind_geometry(py::module& m) {
  auto geometry =
      m.def_submodule("geometry", "core/geometry.h, along one dimension; ranges are (begin, end).");
  geometry.def(
      "piece_of",
      [](int64_t size, int64_t pieces, int64_t index) {
        const auto range = patchconv::piece_of(size, pieces, index);
        return Ends{range.begin, range.end};
      },
      py::arg("size"), py::arg("pieces"), py::arg("index"));
  geometry.def(
      "big_range",
      [](Ends small, int64_t kernel, int64_t stride, int64_t dilation, int64_t pad_before) {
        const auto range =
            geometry_dim(0, 0, kernel, stride, dilation, pad_before).big_range({small.first, small.second});
        return Ends{range.begin, range.end};
      },
      py::arg("small"), py::kw_only(), py::arg("kernel"), py::arg("stride"), py::arg("dilation"),
      py::arg("pad_before"));
  geometry.def(
      "small_range",
      [](Ends big, int64_t size, int64_t kernel, int64_t stride, int64_t dilation, int64_t pad_before) {
        const auto range =
            geometry_dim(0, size, kernel, stride, dilation, pad_before).small_range({big.first, big.second});
        return Ends{range.begin, range.end};
      },
      py::arg("big"), py::kw_only(), py::arg("size"), py::arg("kernel"), py::arg("stride"),
      py::arg("dilation"), py::arg("pad_before"), "Clipped to [0, size).");
  geometry.def(
      "source_indices",
      [](const std::string& padding_mode, Ends range, int64_t size) {
        patchconv::PaddingMode mode;
        if (!patchconv::parse_padding_mode(padding_mode, &mode)) {
          throw py::value_error(
              "source_indices: expected padding_mode to be 'zeros', 'reflect', 'replicate' or "
              "'circular', got '" +
              padding_mode + "'");
        }
        return patchconv::source_indices(mode, {range.first, range.second}, size);
      },
      py::arg("padding_mode"), py::arg("range"), py::arg("size"));
}

void bind_census(py::module& m) {
  using patchconv::Census;
  py::class_<Census, std::shared_ptr<Census>>(m, "Census", "Every allocation of one step, between marks.")
      .def(py::init([](const std::string& device, bool count, bool events) {
             return Census::start(c10::Device(device), count, events);
           }),
           py::arg("device"), py::arg("count"), py::arg("events") = true)
      .def("stop", &Census::stop)
      .def("enter", &Census::enter)
      .def("leave", &Census::leave)
      .def("memory", &Census::memory, py::arg("block"), py::arg("bytes"))
      .def("operator_name", &Census::operator_name)
      .def("peak", &Census::peak)
      .def("events", &census_events);
}

void bind_strips(py::module& m) {
  using namespace patchconv;
  auto strips =
      m.def_submodule("strips", "core/strips.h: memory while a network is computed strip by strip.");
  strips.def("copies_rest", &copies_rest, py::arg("rest"), py::arg("length"));
  strips.def("makes_room", &makes_room, py::arg("rest"), py::arg("length"));
  py::class_<CountedRows>(strips, "CountedRows", "Rows of a value that are there, with lengths alone.")
      .def(py::init<int64_t, bool>(), py::arg("row"), py::arg("together") = true)
      .def(py::init<const CountedRows&>())
      .def_readwrite("widest", &CountedRows::widest)
      .def_property_readonly("bytes", &CountedRows::bytes)
      .def("add", &CountedRows::add, py::arg("length"))
      .def(
          "state",
          [](const CountedRows& rows) {
            const auto& begins = rows.begins();
            const py::bytes pieces(reinterpret_cast<const char*>(begins.data()),
                                   begins.size() * sizeof(int64_t));
            return py::make_tuple(rows.end(), rows.bytes(), rows.below(), pieces);
          },
          "All that what follows depends on.");
  py::class_<StripRead>(strips, "Read", "What a step reads of a value.")
      .def(py::init([](std::vector<RowRange> ranges, int64_t copies, int rows, int drops,
                       std::vector<int64_t> keep) {
             return StripRead{std::move(ranges), copies, rows, drops, std::move(keep)};
           }),
           py::kw_only(), py::arg("ranges"), py::arg("copies"), py::arg("rows"), py::arg("drops"),
           py::arg("keep"));
  py::class_<StripStep>(strips, "Step", "Calls that are computed row by row, one after the other.")
      .def(py::init([](std::vector<RowRange> rows, int64_t peak, int64_t result, int64_t aside, bool asks,
                       bool views, int room, std::vector<std::pair<int, bool>> keeps,
                       std::vector<StripRead> reads) {
             return StripStep{std::move(rows), peak, result,           aside,           asks,
                              views,           room, std::move(keeps), std::move(reads)};
           }),
           py::kw_only(), py::arg("rows"), py::arg("peak"), py::arg("result"), py::arg("aside"),
           py::arg("asks"), py::arg("views"), py::arg("room"), py::arg("keeps"), py::arg("reads"));
  strips.def("peak", &peak_of_strips, py::arg("steps"), py::arg("rows"), py::arg("strips"),
             "The most bytes above what is there before, and how many more are there afterwards.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "The native part of patchconv_native. Importing it registers the operators torch.ops.patchconv.*.";
  m.def(
      "version", [] { return std::string(PATCHCONV_VERSION); },
      "The package's version, with the torch release and CUDA version it was built for.");
  m.def("built_with", &built_with,
        "What this library was compiled with: torch, cuda and archs (None in a CPU-only build), compiler.");
  m.def("conv", torch::wrap_pybind_function_no_gil(&conv),
        "torch.ops.patchconv.conv{dims}d, with every argument a list.");
  m.def("conv_given", torch::wrap_pybind_function_no_gil(&conv_given),
        "conv() with an output that the caller has computed: only the node for backward is made.");
  m.def("conv_transpose", torch::wrap_pybind_function_no_gil(&conv_transpose),
        "torch.ops.patchconv.conv_transpose{dims}d, with every argument a list.");
  m.def("workspace_limit", &patchconv::workspace_limit,
        "Bytes of transient memory that automatic splits allow a call.");
  m.def("set_workspace_limit", &patchconv::set_workspace_limit, py::arg("bytes"));
  m.def("backend", [] { return patchconv::backend_name(patchconv::backend()); });
  m.def(
      "set_backend", [](const std::string& name) { patchconv::set_backend(patchconv::parse_backend(name)); },
      py::arg("name"));
  m.def("recompute", &patchconv::recompute,
        "Whether nodes rebuild an input from its producer instead of saving it.");
  m.def("set_recompute", &patchconv::set_recompute, py::arg("on"));
  m.def("own_settings", &own_settings,
        "What this thread has set for itself: workspace limit, backend, recompute; None: not set.");
  m.def("set_own_settings", &set_own_settings, py::arg("workspace_limit"), py::arg("backend"),
        py::arg("recompute"));
  m.def("last_path", [] { return path_dict(patchconv::last_path()); });
  m.def("start_path_log", &patchconv::start_path_log);
  m.def("stop_path_log", [] {
    py::list records;
    for (const auto& record : patchconv::stop_path_log()) records.append(path_dict(record));
    return records;
  });
  m.def(
      "set_conv_rules", &set_conv_rules, py::arg("arch"), py::arg("rules").none(true),
      "Where backend 'auto' uses this project's kernels on GPUs of this architecture (90 for sm_90): a list "
      "of dicts, of which the first that matches decides; None removes the table.");
  m.def("has_conv_rules", &patchconv::has_conv_rules, py::arg("arch"));
  m.def("prefers_native_kernel", &prefers_native_kernel, py::arg("arch"), py::kw_only(), py::arg("pass_"),
        py::arg("dtype"), py::arg("layout"), py::arg("groups"), py::arg("sources"), py::arg("outputs"),
        py::arg("taps"), py::arg("stride"), py::arg("places"),
        "What the rules say of one pass of a convolution; False without a rule.");
  m.def("plan", &plan, py::kw_only(), py::arg("input"), py::arg("weight"), py::arg("stride"),
        py::arg("padding"), py::arg("output_padding"), py::arg("dilation"), py::arg("groups"),
        py::arg("transposed"), py::arg("padding_mode"), py::arg("splits"), py::arg("input_stride"),
        py::arg("weight_stride"), py::arg("dtype"), py::arg("weight_dtype"), py::arg("device"),
        py::arg("pass_"), "How a convolution of these sizes would be computed.");
  bind_census(m);
  bind_geometry(m);
  bind_strips(m);
}
