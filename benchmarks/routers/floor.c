/* What a file on its way to a disk costs when nothing is done but the system calls: no digests, records or names.
 *
 *     floor receive FILE BYTES CONNECTIONS     prints its port; receives, and writes past the page cache
 *     floor send FILE BYTES CONNECTIONS PORT   sendfile, out of the page cache
 *     floor write FILE BYTES WRITERS           the writing alone
 *
 * Each connection, or writer, is a process and has its part of the file; all is on the disk at the end. Each prints at
 * its end what it cost in seconds of the processor. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK (1 << 20)

static const char *path;
static long part;
static char *buffer;

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

/* The first 8 bytes of a stream say which part of the file it is. */
static void send_part(long number, int port)
{
    int file = open(path, O_RDONLY), sock = connected(port);
    off_t at = number * part;
    char rest;
    if (file < 0 || write(sock, &number, sizeof number) != sizeof number)
        fail(path);
    while (at < (number + 1) * part)
        if (sendfile(sock, file, &at, (number + 1) * part - at) <= 0)
            fail("sendfile");
    shutdown(sock, SHUT_WR);
    while (read(sock, &rest, 1) > 0)
        ;
}

static void write_part(long number, int sock)
{
    int file = open(path, O_WRONLY | O_DIRECT);
    if (file < 0)
        fail(path);
    if (sock >= 0 && recv(sock, &number, sizeof number, MSG_WAITALL) != sizeof number)
        fail("recv");
    for (off_t at = number * part; at < (number + 1) * part; at += BLOCK) {
        if (sock >= 0 && recv(sock, buffer, BLOCK, MSG_WAITALL) != BLOCK)
            fail("recv");
        if (pwrite(file, buffer, BLOCK, at) != BLOCK)
            fail("pwrite");
    }
    if (fdatasync(file))
        fail("fdatasync");
}

int main(int argc, char **argv)
{
    struct rusage used;
    int listening = -1, file;
    if (argc < 5)
        return 64;
    long size = atol(argv[3]), count = atol(argv[4]);
    path = argv[2];
    part = size / count;
    if (part * count != size || part % BLOCK)
        return 64;
    buffer = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(buffer, 1, BLOCK);
    if (strcmp(argv[1], "send")) {
        if ((file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600)) < 0 || posix_fallocate(file, 0, size))
            fail(path);
        close(file);
    }
    if (!strcmp(argv[1], "receive"))
        listening = listening_socket();
    for (long number = 0; number < count; number++) {
        int sock = listening < 0 ? -1 : accept(listening, NULL, NULL);
        if (fork() == 0) {
            if (!strcmp(argv[1], "send"))
                send_part(number, atoi(argv[5]));
            else
                write_part(number, sock);
            exit(0);
        }
        if (sock >= 0)
            close(sock);
    }
    for (int status; wait(&status) > 0;)
        if (status)
            return 2;
    getrusage(RUSAGE_CHILDREN, &used);
    printf("{\"cpu_s\": %.6f}\n", used.ru_utime.tv_sec + used.ru_stime.tv_sec
           + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    return 0;
}
