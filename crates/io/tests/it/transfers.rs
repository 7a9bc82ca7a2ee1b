//! Transfers through both carriers: what is written is read, in any order, and failures say where.

use ferrospeed_io::{ALIGNMENT, Buffer, IoError, OpenFile, Queue, QueueOptions, SwapFile};

fn queues() -> [Queue; 3] {
    let options =
        QueueOptions { block_bytes: 2 * ALIGNMENT, depth: 3, threads: 2, ..QueueOptions::default() };
    let (one_by_one, by_threads) =
        (QueueOptions { single_submit: true, ..options }, QueueOptions { uring: false, ..options });
    [options, one_by_one, by_threads].map(Queue::new)
}

fn filled(seed: usize, bytes: usize) -> Buffer {
    let mut buffer = Buffer::new(bytes);
    buffer
        .bytes_mut()
        .iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = (at * 7 + seed * 13 + at / 251) as u8);
    buffer
}

#[test]
fn what_was_written_is_read_from_many_places_at_once() {
    let folder = tempfile::tempdir().unwrap();
    for queue in queues() {
        let (count, bytes) = (20, 9 * ALIGNMENT);
        let file = SwapFile::create(folder.path(), (count * bytes) as u64).unwrap();
        let place = |index: usize| (index * bytes) as u64;
        let writes: Vec<_> = (0..count)
            .map(|index| queue.write(&file, place(index), filled(index, bytes), bytes).unwrap())
            .collect();
        for write in writes {
            write.wait().unwrap();
        }
        let reads: Vec<_> = (0..count)
            .rev()
            .map(|index| (index, queue.read(&file, place(index), Buffer::new(bytes), bytes).unwrap()))
            .collect();
        for (index, read) in reads {
            assert_eq!(read.wait().unwrap().bytes(), filled(index, bytes).bytes(), "{index}");
        }
        let traffic = queue.traffic();
        assert_eq!((traffic.read, traffic.written), ((count * bytes) as u64, (count * bytes) as u64));
    }
}

#[test]
fn an_operation_that_is_dropped_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    for queue in queues() {
        let bytes = 64 * ALIGNMENT;
        let file = SwapFile::create(folder.path(), bytes as u64).unwrap();
        drop(queue.write(&file, 0, filled(1, bytes), bytes).unwrap());
        let read = queue.read(&file, 0, Buffer::new(bytes), bytes).unwrap().wait().unwrap();
        assert_eq!(read.bytes(), filled(1, bytes).bytes());
    }
}

#[test]
fn a_swap_file_leaves_no_name_behind_and_takes_its_room_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = SwapFile::create(folder.path(), 1 << 20).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    assert_eq!(file.len(), 1 << 20);
    let error = SwapFile::create(folder.path(), 1 << 60).unwrap_err();
    assert!(matches!(&error, IoError::Room { needed, .. } if *needed == 1 << 60), "{error}");
    let error = SwapFile::create(std::path::Path::new("/proc/nowhere"), 4096).unwrap_err();
    assert!(error.to_string().contains("/proc/nowhere"), "{error}");
}

#[test]
fn places_outside_the_file_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let queue = Queue::new(QueueOptions::default());
    let file = SwapFile::create(folder.path(), 2 * ALIGNMENT as u64).unwrap();
    for (offset, length) in
        [(0, 3 * ALIGNMENT), (2 * ALIGNMENT as u64, ALIGNMENT), (u64::MAX - 4095, ALIGNMENT), (8, 8)]
    {
        let refused = queue.read(&file, offset, Buffer::new(3 * ALIGNMENT), length);
        assert!(matches!(refused, Err(IoError::Request(_))), "{length} at {offset}");
    }
}

#[test]
fn a_disk_is_measured_both_ways_and_nothing_stays() {
    let folder = tempfile::tempdir().unwrap();
    for uring in [true, false] {
        let options = QueueOptions { uring, ..QueueOptions::default() };
        let speed = ferrospeed_io::bench::disk_speed(folder.path(), 20 << 20, 1, options).unwrap();
        assert!(speed.read > 0.0 && speed.written > 0.0, "{speed:?}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn transfers_are_noted_one_by_one_while_somebody_wants_to_know() {
    let folder = tempfile::tempdir().unwrap();
    for queue in queues() {
        let bytes = 5 * ALIGNMENT;
        let file = SwapFile::create(folder.path(), 2 * bytes as u64).unwrap();
        let begin = std::time::Instant::now();
        let buffer = queue.write(&file, 0, filled(1, bytes), bytes).unwrap().wait().unwrap();
        assert!(queue.take_spans().is_empty(), "nobody has asked");
        queue.keep_spans(2);
        let buffer = queue.write(&file, 0, buffer, bytes).unwrap().wait().unwrap();
        let buffer = queue.read(&file, 0, buffer, ALIGNMENT).unwrap().wait().unwrap();
        queue.read(&file, 0, buffer, bytes).unwrap().wait().unwrap();
        let spans = queue.take_spans();
        let seen: Vec<(bool, u64)> = spans.iter().map(|span| (span.is_read, span.bytes)).collect();
        // In as many requests as it may take, a transfer is one; a third is beyond the limit.
        assert_eq!(seen, [(false, bytes as u64), (true, ALIGNMENT as u64)]);
        assert!(spans.iter().all(|span| begin <= span.begin && span.begin <= span.end));
        assert!(spans[0].end <= spans[1].begin);
        assert!(queue.take_spans().is_empty());
    }
}

/// Memory at a multiple of a page, filled with a pattern, and where that begins.
fn given(pages: usize) -> (Vec<u8>, usize) {
    let mut memory: Vec<u8> = Vec::with_capacity((pages + 1) * ALIGNMENT);
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    memory.resize(start, 0);
    memory.extend((0..pages * ALIGNMENT).map(|at| ((at * 31) >> 4) as u8));
    (memory, start)
}

#[test]
fn an_ordinary_file_is_written_from_memory_of_the_callers_and_read_to_its_last_byte() {
    let folder = tempfile::tempdir().unwrap();
    for uring in [true, false] {
        let queue = Queue::new(QueueOptions { uring, block_bytes: 2 * ALIGNMENT, ..QueueOptions::default() });
        for direct in [true, false] {
            let path = folder.path().join(format!("{uring} {direct}"));
            let file = std::fs::File::create_new(&path).unwrap();
            let open = OpenFile::to_write(file.try_clone().unwrap(), &path);
            assert!(!open.is_direct());
            assert!(!direct || !open.set_direct(true) || open.is_direct());
            let (memory, start) = given(5);
            let expected = memory.clone();
            let buffer = Buffer::given(memory, start).unwrap();
            let written = queue.write(&open, 0, buffer, 5 * ALIGNMENT).unwrap().wait().unwrap();
            assert_eq!(written.into_given().unwrap(), expected);
            // The last page of what is read is not full.
            file.set_len(5 * ALIGNMENT as u64 - 100).unwrap();
            let flags = std::os::unix::fs::OpenOptionsExt::custom_flags;
            let mut options = std::fs::OpenOptions::new();
            let options = flags(options.read(true), if open.is_direct() { libc::O_DIRECT } else { 0 });
            let open = OpenFile::to_read(options.open(&path).unwrap(), &path).unwrap();
            assert_eq!(open.len(), 5 * ALIGNMENT as u64 - 100);
            let read = queue.read(&open, ALIGNMENT as u64, Buffer::new(8 * ALIGNMENT), 4 * ALIGNMENT - 100);
            let read = read.unwrap().wait().unwrap();
            assert_eq!(
                read.bytes()[..4 * ALIGNMENT - 100],
                expected[start + ALIGNMENT..][..4 * ALIGNMENT - 100]
            );
            let beyond = queue.read(&open, 5 * ALIGNMENT as u64, Buffer::new(ALIGNMENT), ALIGNMENT);
            assert!(matches!(beyond, Err(IoError::Request(_))));
        }
    }
}

#[test]
fn memory_that_no_disk_can_use_is_refused() {
    let (memory, start) = given(2);
    assert!(matches!(Buffer::given(memory.clone(), start + 1), Err(IoError::Request(_))));
    assert!(matches!(Buffer::given(Vec::new(), 0), Err(IoError::Request(_))));
    assert!(Buffer::new(3 << 20).into_given().is_none());
}

#[test]
fn large_buffers_begin_at_huge_pages() {
    for bytes in [2 << 20, (5 << 20) + 1] {
        let mut buffer = Buffer::new(bytes);
        assert!((buffer.address().as_ptr() as usize).is_multiple_of(2 << 20) && buffer.len() >= bytes);
        assert!(buffer.bytes().iter().all(|byte| *byte == 0));
        buffer.bytes_mut().fill(7);
    }
}
