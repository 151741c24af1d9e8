/* Runs one kernel on recorded memory: replay MEMORY AFTER. See replay.py. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <valgrind/callgrind.h>
#include <valgrind/memcheck.h>

extern void kernel(int64_t block) __asm__(KERNEL);

typedef struct {
    int64_t size, page_offset, is_secret;
    char *data;
} Piece;

static void read_exactly(void *to, size_t size, FILE *file) {
    if (fread(to, 1, size, file) != size) {
        fprintf(stderr, "the file of memory is too short\n");
        exit(2);
    }
}

int main(int count, char **names) {
    FILE *file = count == 3 ? fopen(names[1], "rb") : NULL;
    if (file == NULL) {
        fprintf(stderr, "usage: replay MEMORY AFTER\n");
        return 2;
    }
    int64_t sizes[2];
    read_exactly(sizes, sizeof sizes, file);
    Piece *pieces = calloc(sizes[0], sizeof(Piece));
    for (int64_t i = 0; i < sizes[0]; i++) {
        Piece *piece = &pieces[i];
        read_exactly(piece, 3 * sizeof(int64_t), file);
        char *pages = aligned_alloc(4096, (piece->size + 2 * 4096) / 4096 * 4096);
        piece->data = pages + piece->page_offset;
        read_exactly(piece->data, piece->size, file);
    }
    for (int64_t i = 0; i < sizes[1]; i++) {
        int64_t link[4];
        read_exactly(link, sizeof link, file);
        int64_t address = (int64_t)(pieces[link[2]].data + link[3]);
        memcpy(pieces[link[0]].data + link[1], &address, sizeof address);
    }
    fclose(file);
    for (int64_t i = 0; i < sizes[0]; i++)
        if (pieces[i].is_secret) VALGRIND_MAKE_MEM_UNDEFINED(pieces[i].data, pieces[i].size);
    CALLGRIND_TOGGLE_COLLECT;
    kernel((int64_t)pieces[0].data);
    CALLGRIND_TOGGLE_COLLECT;
    file = fopen(names[2], "wb");
    for (int64_t i = 0; i < sizes[0]; i++) {
        VALGRIND_MAKE_MEM_DEFINED(pieces[i].data, pieces[i].size);
        fwrite(pieces[i].data, 1, pieces[i].size, file);
    }
    return fclose(file) != 0;
}
