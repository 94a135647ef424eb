/* Kernel passthrough for pyfuse3: sees every FUSE message between the kernel and libfuse, and adds what neither pyfuse3
 * nor libfuse 3.14 can say.
 *
 * Loaded with RTLD_GLOBAL before pyfuse3, so that the dynamic linker resolves pyfuse3's call of fuse_session_mount to the
 * one below. It mounts with the real one and then puts two functions of its own between libfuse and the descriptor
 * (fuse_session_custom_io, libfuse >= 3.13):
 *
 *   INIT request    remembers whether the kernel offers passthrough; where that is wanted, hides SPLICE_READ, so that
 *                   all messages come through read() and can be seen (spliced, the bytes of writes are copied once less,
 *                   which is what the Python data path wants)
 *   INIT reply      FUSE_HANDLE_KILLPRIV_V2 (else the kernel asks for security.capability before every write), and
 *                   FUSE_PASSTHROUGH with max_stack_depth when it is wanted and offered
 *   OPEN, CREATE    FOPEN_PASSTHROUGH and the backing id registered for the handle
 *   OPENDIR         FOPEN_CACHE_DIR: the kernel keeps listings until the directory changes
 *   GETATTR         of a directory: answered here, from the daemon's descriptor of it. The kernel forgets a directory's
 *                   attributes with every change in it and asks for them again before the next one, to check permissions
 *   GETXATTR        of security.capability: there is none; asked for once for each new file that is written
 *
 * Layouts and numbers are those of the Linux UAPI header fuse.h (7.40); they are fixed by the kernel's ABI. No Python code
 * runs for a message, and the GIL is not needed: libfuse may call from any thread.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OP_GETATTR = 3, OP_SETATTR = 4, OP_OPEN = 14, OP_WRITE = 16, OP_GETXATTR = 22, OP_INIT = 26, OP_OPENDIR = 27, OP_CREATE = 35 };

#define INIT_SPLICE_READ (1u << 9)
#define INIT_KILLPRIV_V2 (1u << 28)
#define INIT_EXT (1u << 30)
#define INIT2_PASSTHROUGH (1u << 5) /* bit 37 of both words */
#define FOPEN_DIRECT_IO (1u << 0)
#define FOPEN_KEEP_CACHE (1u << 1)
#define FOPEN_CACHE_DIR (1u << 3)
#define FOPEN_NOFLUSH (1u << 5)
#define FOPEN_PASSTHROUGH (1u << 7)
#define ENTRY_OUT_SIZE 128

struct in_header {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, extra;
};
struct out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};
struct init_in {
    uint32_t major, minor, max_readahead, flags, flags2, unused[11];
};
struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth, unused[6];
};
struct open_out {
    uint64_t fh;
    uint32_t open_flags, backing_id;
};
struct attr_out {
    uint64_t valid;
    uint32_t valid_nsec, dummy;
    uint64_t ino, size, blocks, atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, blksize, flags;
};
struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

struct custom_io { /* as in fuse_lowlevel.h of 3.13 to 3.16; later ones append to it */
    ssize_t (*writev)(int fd, struct iovec *iov, int count, void *userdata);
    ssize_t (*read)(int fd, void *buf, size_t len, void *userdata);
    void *splice_receive, *splice_send;
};

#define ATTR_SECONDS 300 /* as operations.TIMEOUT */
struct directory {
    uint64_t nodeid; /* 0: never used */
    int fd;          /* -1: forgotten */
};
#define PENDING 1024
static struct {
    pthread_mutex_t lock;
    struct { uint64_t unique; uint32_t opcode; } pending[PENDING]; /* requests whose reply is to be changed */
    unsigned count;
    uint32_t *backing; /* by handle: backing id, 0 for none */
    size_t handles;
    struct directory *directories; /* a hash table with open addressing; `room` is a power of two */
    size_t room, used;
    int fd;            /* the session's /dev/fuse, -1 before the mount */
    int wanted;        /* stack depth to ask passthrough for, 0: do not */
    int offered, granted, hooked;
    int kills;         /* whether the last request asks to drop set-user-id and set-group-id bits, if it was seen */
} state = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

static struct directory *slot(struct directory *table, size_t room, uint64_t nodeid)
{
    size_t at = (nodeid * 0x9E3779B97F4A7C15u) & (room - 1);
    while (table[at].nodeid && table[at].nodeid != nodeid)
        at = (at + 1) & (room - 1);
    return &table[at];
}

/* Return 0, or -1 without memory. Forgotten directories are left behind when the table grows. */
static int know_directory(uint64_t nodeid, int fd)
{
    if (state.used * 2 >= state.room) {
        size_t living = 0, room = 1024;
        for (size_t i = 0; i < state.room; i++)
            living += state.directories[i].nodeid && state.directories[i].fd >= 0;
        while (room < living * 4 + 4)
            room *= 2;
        struct directory *more = calloc(room, sizeof *more);
        if (!more)
            return -1;
        for (size_t i = 0; i < state.room; i++)
            if (state.directories[i].nodeid && state.directories[i].fd >= 0)
                *slot(more, room, state.directories[i].nodeid) = state.directories[i];
        free(state.directories);
        state.directories = more;
        state.room = room;
        state.used = living;
    }
    struct directory *found = slot(state.directories, state.room, nodeid);
    state.used += !found->nodeid;
    found->nodeid = nodeid;
    found->fd = fd;
    return 0;
}

/* Answer a GETATTR of a directory; return whether that was done. */
static int answer_directory(int fuse_fd, const struct in_header *head)
{
    struct { struct out_header head; struct attr_out attr; } reply = {0};
    struct stat st;
    int fd = state.room ? slot(state.directories, state.room, head->nodeid)->fd : -1;

    if (!state.room || !slot(state.directories, state.room, head->nodeid)->nodeid || fd < 0)
        return 0;
    if (fstat(fd, &st) != 0 || !S_ISDIR(st.st_mode))
        return 0;
    reply.head.len = sizeof reply;
    reply.head.unique = head->unique;
    reply.attr = (struct attr_out){
        .valid = ATTR_SECONDS, .ino = head->nodeid, .size = st.st_size, .blocks = st.st_blocks,
        .atime = st.st_atim.tv_sec, .mtime = st.st_mtim.tv_sec, .ctime = st.st_ctim.tv_sec,
        .atimensec = st.st_atim.tv_nsec, .mtimensec = st.st_mtim.tv_nsec, .ctimensec = st.st_ctim.tv_nsec,
        .mode = st.st_mode, .nlink = st.st_nlink, .uid = st.st_uid, .gid = st.st_gid, .blksize = st.st_blksize,
    };
    return write(fuse_fd, &reply, sizeof reply) == sizeof reply;
}

/* Answer a GETXATTR of security.capability; return whether that was done. */
static int answer_capability(int fuse_fd, const struct in_header *head, size_t len)
{
    static const char name[] = "security.capability";
    const char *asked = (const char *)(head + 1) + 8; /* after size and padding */
    struct out_header reply = {.len = sizeof reply, .error = -ENODATA, .unique = head->unique};

    if (len < sizeof *head + 8 + sizeof name || memcmp(asked, name, sizeof name) != 0)
        return 0;
    return write(fuse_fd, &reply, sizeof reply) == sizeof reply;
}

static void seen(struct in_header *head, size_t len)
{
    char *body = (char *)(head + 1);
    size_t size = len - sizeof *head;
    uint32_t word[6] = {0};

    memcpy(word, body, size < sizeof word ? size : sizeof word);
    switch (head->opcode) {
    case OP_INIT: {
        struct init_in *in = (struct init_in *)body;
        state.offered = size >= sizeof *in && (in->flags & INIT_EXT) && (in->flags2 & INIT2_PASSTHROUGH);
        if (size >= 16 && state.wanted)
            in->flags &= ~INIT_SPLICE_READ;
        break;
    }
    case OP_WRITE: /* fh, offset, size, write_flags */
        state.kills = (word[5] & 4u) != 0;
        return;
    case OP_SETATTR: /* valid */
        state.kills = (word[0] & (1u << 11)) != 0;
        return;
    case OP_OPEN: /* flags, open_flags */
        state.kills = (word[1] & 1u) != 0;
        break;
    case OP_CREATE: /* flags, mode, umask, open_flags */
        state.kills = (word[3] & 1u) != 0;
        break;
    case OP_OPENDIR:
        break;
    default:
        return;
    }
    if (state.count < PENDING) { /* more cannot be under way: threads.REQUESTS */
        state.pending[state.count].unique = head->unique;
        state.pending[state.count].opcode = head->opcode;
        state.count++;
    }
}

static uint32_t taken(uint64_t unique)
{
    for (unsigned i = 0; i < state.count; i++)
        if (state.pending[i].unique == unique) {
            uint32_t opcode = state.pending[i].opcode;
            state.pending[i] = state.pending[--state.count];
            return opcode;
        }
    return 0;
}

static void pass(struct open_out *out)
{
    uint32_t id = out->fh < state.handles ? state.backing[out->fh] : 0;
    if (id) {
        out->open_flags = FOPEN_PASSTHROUGH | FOPEN_NOFLUSH;
        out->backing_id = id;
    }
}

static void answered(uint32_t opcode, char *body, size_t size)
{
    if (opcode == OP_INIT && size >= sizeof(struct init_out)) {
        struct init_out *out = (struct init_out *)body;
        out->flags |= INIT_KILLPRIV_V2;
        if (state.wanted && state.offered) {
            out->flags |= INIT_EXT;
            out->flags2 |= INIT2_PASSTHROUGH;
            out->max_stack_depth = state.wanted;
            state.granted = 1;
        }
    } else if (opcode == OP_OPEN && size >= sizeof(struct open_out)) {
        pass((struct open_out *)body);
    } else if (opcode == OP_CREATE && size >= ENTRY_OUT_SIZE + sizeof(struct open_out)) {
        pass((struct open_out *)(body + ENTRY_OUT_SIZE));
    } else if (opcode == OP_OPENDIR && size >= sizeof(struct open_out)) {
        ((struct open_out *)body)->open_flags |= FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR;
    }
}

static ssize_t on_read(int fd, void *buf, size_t len, void *userdata)
{
    (void)userdata;
    ssize_t got = read(fd, buf, len);
    int done = 0;
    if (got >= (ssize_t)sizeof(struct in_header)) {
        pthread_mutex_lock(&state.lock);
        uint32_t opcode = ((struct in_header *)buf)->opcode;
        done = (opcode == OP_GETATTR && answer_directory(fd, buf)) ||
               (opcode == OP_GETXATTR && answer_capability(fd, buf, (size_t)got));
        if (!done)
            seen(buf, (size_t)got);
        pthread_mutex_unlock(&state.lock);
    }
    if (done) {
        errno = EINTR; /* nothing is left for the caller, who then waits for the next message */
        return -1;
    }
    return got;
}

static ssize_t on_writev(int fd, struct iovec *iov, int count, void *userdata)
{
    (void)userdata;
    struct out_header *head = iov[0].iov_base;
    if (count > 0 && iov[0].iov_len == sizeof *head && head->unique) {
        pthread_mutex_lock(&state.lock);
        uint32_t opcode = state.count ? taken(head->unique) : 0;
        if (opcode && !head->error && count > 1)
            answered(opcode, iov[1].iov_base, iov[1].iov_len);
        pthread_mutex_unlock(&state.lock);
    }
    return writev(fd, iov, count);
}

/* Takes the place of libfuse's in pyfuse3. */
__attribute__((visibility("default"))) int fuse_session_mount(void *session, const char *mountpoint)
{
    int (*mount)(void *, const char *) = (int (*)(void *, const char *))dlsym(RTLD_NEXT, "fuse_session_mount");
    int (*session_fd)(void *) = (int (*)(void *))dlsym(RTLD_NEXT, "fuse_session_fd");
    /* This version of the symbol takes three arguments in every libfuse that has it. */
    int (*custom_io)(void *, const struct custom_io *, int) =
        (int (*)(void *, const struct custom_io *, int))dlvsym(RTLD_NEXT, "fuse_session_custom_io", "FUSE_3.0");
    static const struct custom_io io = {.writev = on_writev, .read = on_read};
    int result;

    if (!mount)
        return -1;
    result = mount(session, mountpoint);
    if (result == 0 && session_fd && custom_io) {
        state.fd = session_fd(session);
        state.count = 0;
        state.offered = state.granted = 0;
        state.hooked = custom_io(session, &io, state.fd) == 0;
    }
    return result;
}

static PyObject *configure(PyObject *self, PyObject *args)
{
    int depth;
    if (!PyArg_ParseTuple(args, "i", &depth))
        return NULL;
    state.wanted = depth;
    Py_RETURN_NONE;
}

static PyObject *status(PyObject *self, PyObject *args)
{
    int usable = dlvsym(RTLD_DEFAULT, "fuse_session_custom_io", "FUSE_3.0") != NULL;
    return Py_BuildValue("(iiii)", usable, state.hooked, state.offered, state.granted);
}

static PyObject *backing_open(PyObject *self, PyObject *args)
{
    struct backing_map map = {0};
    if (!PyArg_ParseTuple(args, "i", &map.fd))
        return NULL;
    int id = ioctl(state.fd, BACKING_OPEN, &map);
    if (id < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLong(id);
}

static PyObject *backing_close(PyObject *self, PyObject *args)
{
    unsigned int id;
    if (!PyArg_ParseTuple(args, "I", &id))
        return NULL;
    uint32_t value = id;
    if (ioctl(state.fd, BACKING_CLOSE, &value) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *set_backing(PyObject *self, PyObject *args)
{
    unsigned long handle;
    unsigned int id;
    if (!PyArg_ParseTuple(args, "kI", &handle, &id))
        return NULL;
    pthread_mutex_lock(&state.lock);
    if (handle >= state.handles) {
        size_t size = handle + 1024;
        uint32_t *more = realloc(state.backing, size * sizeof *more);
        if (!more) {
            pthread_mutex_unlock(&state.lock);
            return PyErr_NoMemory();
        }
        memset(more + state.handles, 0, (size - state.handles) * sizeof *more);
        state.backing = more;
        state.handles = size;
    }
    state.backing[handle] = id;
    pthread_mutex_unlock(&state.lock);
    Py_RETURN_NONE;
}

static PyObject *set_directory(PyObject *self, PyObject *args)
{
    unsigned long long nodeid;
    int fd, failed;
    if (!PyArg_ParseTuple(args, "Ki", &nodeid, &fd))
        return NULL;
    pthread_mutex_lock(&state.lock);
    failed = know_directory(nodeid, fd);
    pthread_mutex_unlock(&state.lock);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *kills(PyObject *self, PyObject *args)
{
    /* A request that was not seen may have asked for it. */
    return PyBool_FromLong(state.wanted ? state.kills : state.hooked);
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "Ask for passthrough at the next mount; the argument is the stack depth, 0: no."},
    {"status", status, METH_NOARGS, "Return (usable, hooked, offered, granted)."},
    {"backing_open", backing_open, METH_VARARGS, "Register a descriptor's file with the kernel; return its backing id."},
    {"backing_close", backing_close, METH_VARARGS, "Release a backing id."},
    {"set_backing", set_backing, METH_VARARGS, "Let the reply for a file handle carry a backing id (0: none)."},
    {"set_directory", set_directory, METH_VARARGS, "Say by which descriptor a directory node is reached (-1: no more)."},
    {"kills", kills, METH_NOARGS, "Return whether the request being handled asks, or may ask, to drop set-id bits."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_passthrough", .m_doc = "Kernel passthrough for pyfuse3.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__passthrough(void)
{
    return PyModule_Create(&module);
}
