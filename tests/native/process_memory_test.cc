// If Yama lets only ancestors read a process, a rank permits its parent to read its
// memory, but never process 1, from which every process descends.
#include "transport/process_memory.h"

#include "check.h"

// Sanitizers already replace prctl.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>

static long opened_to = -1;

extern "C" int prctl(int option, ...) {
  std::va_list list;
  va_start(list, option);
  unsigned long rest[4];
  for (unsigned long& argument : rest) argument = va_arg(list, unsigned long);
  va_end(list);
  if (option == PR_SET_PTRACER) opened_to = static_cast<long>(rest[0]);
  return static_cast<int>(
      syscall(SYS_prctl, option, rest[0], rest[1], rest[2], rest[3]));
}

namespace ringjax {
namespace {

bool IsOpenedRightly() {
  OwnProof();
  const long parent = getppid();
  return opened_to == (parent > 1 ? parent : -1);
}

TEST(MemoryIsOpenedToTheParentUnlessThatIsProcess1) {
  int status = -1, ends[2];
  CHECK_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const bool right = IsOpenedRightly();
    const pid_t own = getpid(), orphan = fork();
    if (orphan == 0) {
      close(ends[0]);
      while (getppid() == own) usleep(1000);
      opened_to = -1;
      const char said = IsOpenedRightly() ? 'y' : 'n';
      _exit(write(ends[1], &said, 1) == 1 ? 0 : 1);
    }
    _exit(right && orphan > 0 ? 0 : 1);
  }
  close(ends[1]);
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  char said = 0;
  CHECK(read(ends[0], &said, 1) == 1 && said == 'y');
  close(ends[0]);
}

}  // namespace
}  // namespace ringjax
#endif
