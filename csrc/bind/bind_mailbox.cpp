#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../runtime/mailbox.h"
#include "bind.h"

namespace nb = nanobind;

namespace moet {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void make(Mailbox* self, std::shared_ptr<Pool> pool, uint64_t page, uint64_t x, uint64_t ids,
          uint64_t rows, uint32_t max_tokens, uint32_t max_slots, double stall_seconds, bool polls) {
  if (page == 0 || page % alignof(MailPage)) throw Refusal("a mail page lies at a 64-byte boundary");
  new (self) Mailbox(std::move(pool),
                     {at<MailPage>(page), at<const uint8_t>(x), at<const uint8_t>(ids),
                      at<uint8_t>(rows), max_tokens, max_slots},
                     int64_t(stall_seconds * 1e9), polls);
}

}  // namespace

void bind_mailbox(nb::module_& m) {
  nb::class_<Mailbox>(m, "Mailbox", "The CPU's end of a card's mailbox.")
      .def("__init__", &make, nb::arg("pool"), nb::arg("page"), nb::arg("x"), nb::arg("ids"),
           nb::arg("rows"), nb::arg("max_tokens"), nb::arg("max_slots"), nb::arg("stall_seconds"),
           nb::arg("polls"), Unlocked())
      .def("attach", &Mailbox::attach, nb::arg("index"), nb::arg("layer"))
      .def("begin", &Mailbox::begin, nb::arg("posts"), Unlocked())
      .def("settle", &Mailbox::settle, Unlocked())
      .def("answer_now", &Mailbox::answer_now, Unlocked())
      .def("reset", &Mailbox::reset, Unlocked())
      .def("close", &Mailbox::close, Unlocked())
      .def_prop_ro("verdict", [](const Mailbox& m) { return int(m.verdict()); })
      .def_prop_ro("message", &Mailbox::message)
      .def_prop_ro("hint", &Mailbox::hint)
      .def_prop_ro("answered", &Mailbox::answered)
      .def_prop_ro("busy_ns", &Mailbox::busy_ns)
      .def_prop_ro("thread_ids", &Mailbox::thread_ids)
      .def_prop_ro("address", [](const Mailbox& m) { return reinterpret_cast<uintptr_t>(&m); })
      .def("exam_corrupt", &Mailbox::exam_corrupt, nb::arg("what"));
  m.def("answer_now_function", [] { return reinterpret_cast<uintptr_t>(&moet_answer_now); },
        "Address of the C function void(void* mailbox) that a stream's host function calls.");
  m.attr("MAIL_PAGE_BYTES") = sizeof(MailPage);
}

}  // namespace moet
