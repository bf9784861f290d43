// What there is one of in a process, and what a fork must leave usable.
#pragma once

#include <pthread.h>

namespace jcoll {

// The one T. It has a mutex `mu`, which a fork takes, so that it is free in the child, and a
// ForgetParent(), which the child calls then. Never destroyed: threads may outlive static
// destructors.
template <typename T>
T& ForkSafe() {
  static T* const one = [] {
    pthread_atfork([] { ForkSafe<T>().mu.lock(); }, [] { ForkSafe<T>().mu.unlock(); },
                   [] {
                     ForkSafe<T>().ForgetParent();
                     ForkSafe<T>().mu.unlock();
                   });
    return new T();
  }();
  return *one;
}

}  // namespace jcoll
