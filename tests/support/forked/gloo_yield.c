/* Let gloo's receiving thread yield the CPU before it waits for events.

The thread (gloo/transport/tcp/loop.cc) does not handle an event while another thread of its process
holds the lock of the connection; it waits again, and epoll_wait returns the same event at once.  If
it has preempted the holder of the lock, it repeats this some thousand times, to the end of its time
slice.  LD_PRELOAD puts this function in the place of libc's. */

#define _GNU_SOURCE
#include <sched.h>
#include <sys/epoll.h>

static const int GLOOS_TIMEOUT_MS = 10;

int epoll_wait(int epoll, struct epoll_event *events, int most, int timeout_ms) {
    if (timeout_ms == GLOOS_TIMEOUT_MS)
        sched_yield();
    return epoll_pwait(epoll, events, most, timeout_ms, 0);
}
