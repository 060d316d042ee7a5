/* The system calls that one machine cannot do without when small files are delivered, and nothing else: each is read
 * (open, fstat, read, close), written out of sight (O_TMPFILE, write), and, when the data are on the disk, given its
 * name (linkat), which then is brought to the disk too. No network, digests or records. The source's files are named
 * file00000 and so on.
 *
 * calls SOURCE TARGET FILES BATCH */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void must(long result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
}

int main(int count, char **words) {
    if (count != 5) return 2;
    int files = atoi(words[3]), batch = atoi(words[4]);
    int *open_files = calloc(batch, sizeof(int));
    static char data[65536];
    char name[64], link[64];
    int source = open(words[1], O_RDONLY | O_DIRECTORY), target = open(words[2], O_RDONLY | O_DIRECTORY);
    must(source, words[1]);
    must(target, words[2]);
    for (int first = 0; first < files; first += batch) {
        int end = first + batch < files ? first + batch : files;
        for (int number = first; number < end; number++) {
            struct stat status;
            snprintf(name, sizeof name, "file%05d", number);
            int from = openat(source, name, O_RDONLY | O_CLOEXEC);
            must(from, name);
            must(fstat(from, &status), name);
            long length = read(from, data, sizeof data);
            must(length, name);
            close(from);
            int to = openat(target, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0644);
            must(to, "O_TMPFILE");
            must(write(to, data, length), "write");
            open_files[number - first] = to;
        }
        must(syncfs(target), "syncfs");
        for (int number = first; number < end; number++) {
            snprintf(name, sizeof name, "file%05d", number);
            snprintf(link, sizeof link, "/proc/self/fd/%d", open_files[number - first]);
            if (linkat(open_files[number - first], "", target, name, AT_EMPTY_PATH) < 0)
                must(linkat(AT_FDCWD, link, target, name, AT_SYMLINK_FOLLOW), "linkat");
            close(open_files[number - first]);
        }
        must(syncfs(target), "syncfs");
    }
    return 0;
}
