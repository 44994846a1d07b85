// The asynchronous reader.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "../io/reader.h"
#include "bind.h"

namespace nb = nanobind;

namespace moet {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;
using Wanted = std::tuple<int, uint64_t, uint64_t, uint64_t, uint64_t, bool>;
using Ended = std::tuple<uint64_t, int64_t, int64_t, int64_t>;

void submit(Reader& reader, const std::vector<Wanted>& wanted) {
  std::vector<Read> reads;
  reads.reserve(wanted.size());
  for (const auto& [file, offset, bytes, address, tag, urgent] : wanted)
    reads.push_back({file, offset, bytes, at<uint8_t>(address), tag, urgent});
  reader.submit(reads);
}

std::vector<Ended> take(Reader& reader, double seconds) {
  std::vector<Ended> ended;
  for (const Completion& c : reader.take(seconds))
    ended.emplace_back(c.tag, c.result, c.queued_ns, c.read_ns);
  return ended;
}

void exam_fault(Reader& reader, int kind, int64_t nth, int64_t count, int64_t value) {
  if (kind < 0 || kind > 2) throw Refusal("no such fault", "0 an errno, 1 a short read, 2 a flipped bit");
  reader.exam_fault({ReadFault(kind), nth, count, value});
}

}  // namespace

void bind_io(nb::module_& m) {
  nb::class_<Reader>(m, "Reader", "Asynchronous reads of files; see csrc/io/reader.h.")
      .def(nb::init<bool, int, uint64_t>(), nb::arg("uring"), nb::arg("depth"), nb::arg("piece"),
           Unlocked())
      .def("add_file", &Reader::add_file, nb::arg("fd"), nb::arg("direct"), Unlocked())
      .def("remove_file", &Reader::remove_file, nb::arg("file"), Unlocked())
      .def("submit", &submit, nb::arg("reads"),
           "Of (file, offset, bytes, address, tag, urgent) each; all are taken, or none.", Unlocked())
      .def("take", &take, nb::arg("seconds"),
           "(tag, bytes or -errno, ns in the queue, ns at the disk) of what has ended.", Unlocked())
      .def("register_memory", &Reader::register_memory, nb::arg("address"), nb::arg("bytes"),
           "0, or the errno with which it was refused.", Unlocked())
      .def("unregister_memory", &Reader::unregister_memory, nb::arg("address"), Unlocked())
      .def("close", &Reader::close, Unlocked())
      .def_prop_ro("backend", &Reader::backend)
      .def_prop_ro("thread_ids", &Reader::thread_ids)
      .def_prop_ro("running", &Reader::running)
      .def_prop_ro("pending", &Reader::pending)
      .def("exam_fault", &exam_fault, nb::arg("kind"), nb::arg("nth"), nb::arg("count"),
           nb::arg("value"), "Spoils pieces: 0 an errno, 1 a short read, 2 a flipped bit.");
  m.def("probe_uring", &probe_uring, "Why io_uring cannot be used here; empty where it can.",
        Unlocked());
}

}  // namespace moet
