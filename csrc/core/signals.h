// Threads of ours leave signals to the engine's own.
#pragma once
#include <csignal>

#include <pthread.h>

namespace moet {

// Blocks signals while threads are made, which inherit that. Not those that a thread causes itself: a
// crash report must name it.
class SignalsHeldBack {
 public:
  SignalsHeldBack() {
    sigset_t all;
    sigfillset(&all);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, own);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsHeldBack() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  SignalsHeldBack(const SignalsHeldBack&) = delete;
  SignalsHeldBack& operator=(const SignalsHeldBack&) = delete;

 private:
  sigset_t saved_;
};

}  // namespace moet
