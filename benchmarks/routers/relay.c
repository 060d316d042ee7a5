/* The relay that others are measured by: bytes from one connection to another and back, and nothing else.
 *
 *     relay copy|sum|splice CONNECTIONS TARGET_PORT
 *
 * "sum" copies, and looks at each byte once on its way to the target, as CRC-32C does. It waits for no whole block and
 * compares nothing: whoever checks has at least this to do.
 *
 * It prints the port that it listens on, passes so many connections on until their end, each in a process, and prints
 * what that cost in seconds of the processor. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdint.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BUFFER (1 << 20)
#define PIPE (1 << 18)

static void fail(const char *what)
{
    perror(what);
    exit(2);
}

static struct sockaddr_in place(int port)
{
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static int listening_socket(void)
{
    int listening = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = place(0);
    socklen_t size = sizeof address;
    if (bind(listening, (struct sockaddr *)&address, size) || listen(listening, 16))
        fail("listen");
    if (getsockname(listening, (struct sockaddr *)&address, &size))
        fail("getsockname");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return listening;
}

static int connected(int port)
{
    int one = 1, sock = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = place(port);
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(sock, (struct sockaddr *)&address, sizeof address))
        fail("connect");
    return sock;
}

/* What was seen, so that no compiler leaves the look out. */
static volatile uint64_t seen;

/* One step of CRC-32C, or of a sum that is as quick where the processor has no instruction for it. */
#ifdef __x86_64__
#define STEP(sum, word) __builtin_ia32_crc32di(sum, word)
#define HARDWARE __attribute__((target("sse4.2")))
#else
#define STEP(sum, word) (((sum) << 1) + (word))
#define HARDWARE
#endif

static uint64_t word(const char *at)
{
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

/* Three parts at once: each step of one part waits for the one before it. */
HARDWARE static void look(const char *data, size_t count)
{
    uint64_t first = 0, second = 0, third = 0;
    size_t part = count / 24 * 8;
    for (size_t at = 0; at < part; at += 8) {
        first = STEP(first, word(data + at));
        second = STEP(second, word(data + part + at));
        third = STEP(third, word(data + 2 * part + at));
    }
    for (size_t at = 3 * part; at < count; at++)
        first = STEP(first, (unsigned char)data[at]);
    seen = first ^ second ^ third;
}

static void copy(int from, int to, int looks)
{
    char *buffer = malloc(BUFFER);
    ssize_t count;
    while ((count = read(from, buffer, BUFFER)) > 0) {
        if (looks)
            look(buffer, count);
        for (ssize_t done = 0, part; done < count; done += part)
            if ((part = write(to, buffer + done, count - done)) < 0)
                fail("write");
    }
}

static void pass(int from, int to)
{
    int ends[2];
    ssize_t count;
    if (pipe(ends))
        fail("pipe");
    fcntl(ends[1], F_SETPIPE_SZ, PIPE);
    while ((count = splice(from, NULL, ends[1], NULL, PIPE, SPLICE_F_MOVE)) > 0)
        for (ssize_t done = 0, part; done < count; done += part)
            if ((part = splice(ends[0], NULL, to, NULL, count - done, SPLICE_F_MOVE)) < 0)
                fail("splice");
}

static void serve(int near, int port, const char *way)
{
    int far = connected(port);
    if (fork() == 0) {
        copy(far, near, 0);
        shutdown(near, SHUT_WR);
        exit(0);
    }
    if (!strcmp(way, "splice"))
        pass(near, far);
    else
        copy(near, far, !strcmp(way, "sum"));
    shutdown(far, SHUT_WR);
    wait(NULL);
    exit(0);
}

int main(int argc, char **argv)
{
    struct rusage used;
    if (argc != 4)
        return 64;
    int listening = listening_socket();
    for (int left = atoi(argv[2]); left > 0; left--) {
        int near = accept(listening, NULL, NULL);
        if (near < 0)
            fail("accept");
        if (fork() == 0)
            serve(near, atoi(argv[3]), argv[1]);
        close(near);
    }
    while (wait(NULL) > 0)
        ;
    getrusage(RUSAGE_CHILDREN, &used);
    printf("{\"cpu_s\": %.6f}\n", used.ru_utime.tv_sec + used.ru_stime.tv_sec
           + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    return 0;
}
