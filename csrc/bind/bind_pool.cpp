#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../runtime/bandwidth.h"
#include "../runtime/exam.h"
#include "../runtime/pool.h"
#include "bind.h"

namespace nb = nanobind;

namespace moet {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void set_heartbeat(Pool& pool, uint64_t address) {
  if (address % sizeof(uint64_t)) throw Refusal("a heartbeat counter lies at an 8-byte boundary");
  pool.set_heartbeat(at<uint64_t>(address));
}

void make_probe(ReadProbe* self, std::shared_ptr<Pool> pool, uint64_t address, size_t bytes) {
  new (self) ReadProbe(std::move(pool), at<const uint8_t>(address), bytes);
}

nb::dict exam(Pool& pool, int slots, int items, int spin, int throw_at) {
  ExamReport report;
  {
    const nb::gil_scoped_release unlocked;
    report = run_exam(pool, slots, items, spin, throw_at);
  }
  nb::dict out;
  out["done"] = report.done;
  out["by_worker"] = report.by_worker;
  out["mxcsr"] = report.mxcsr;
  out["early"] = report.early;
  return out;
}

}  // namespace

void bind_pool(nb::module_& m) {
  nb::class_<Pool>(m, "Pool", "Threads that run one step at a time; the caller is worker 0.")
      .def(nb::init<int, std::vector<int>>(), nb::arg("threads"), nb::arg("cpus"), Unlocked())
      .def_prop_ro("threads", &Pool::threads)
      .def_prop_ro("cpus", &Pool::cpus)
      .def_prop_ro("thread_ids", &Pool::thread_ids)
      .def_prop_ro("workspace_bytes", &Pool::workspace_bytes)
      .def_prop_ro("heartbeat", &Pool::heartbeat)
      .def("set_heartbeat", &set_heartbeat, nb::arg("address"));
  nb::class_<ReadProbe>(m, "ReadProbe", "A timed loop that reads a block of memory.")
      .def("__init__", &make_probe, nb::arg("pool"), nb::arg("address"), nb::arg("bytes"))
      .def("run", &ReadProbe::pass, "One pass: bytes a second.", Unlocked());
  m.def("exam_stall", &Pool::exam_stall, nb::arg("pool"), nb::arg("worker"),
        nb::arg("milliseconds"), "The next item of a worker (-1: anyone) takes so much longer.");
  m.def("exam_release", &Pool::exam_release, nb::arg("pool"), "Ends a stall.");
  m.def("exam_pool", &exam, nb::arg("pool"), nb::arg("slots"), nb::arg("items"),
        nb::arg("spin") = 0, nb::arg("throw_at") = -1, "Runs a job that counts its items.");
}

}  // namespace moet
