//! Disks that fail, limits that are too low, and kernels that permit less: an error with its place, and nobody waits.

use ferrospeed_testkit::child;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ferrospeed_io::{ALIGNMENT, Buffer, IoError, Layer, Queue, QueueOptions, SwapFile, System};

/// Fails at the n-th transfer, and delivers in small pieces until then.
struct Failing {
    left: AtomicUsize,
    code: i32,
}

impl Failing {
    fn count(&self) -> std::io::Result<()> {
        let counted = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        counted.map(drop).map_err(|_| std::io::Error::from_raw_os_error(self.code))
    }
}

impl Layer for Failing {
    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.count()?;
        let some = bytes.len().min(ALIGNMENT);
        System.read_at(file, &mut bytes[..some], offset)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> std::io::Result<usize> {
        self.count()?;
        System.write_at(file, &bytes[..bytes.len().min(ALIGNMENT)], offset)
    }
}

#[test]
fn a_failing_transfer_is_named_with_its_place_and_the_others_end() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = 4 * ALIGNMENT;
    let options = QueueOptions { block_bytes: 2 * ALIGNMENT, threads: 2, ..QueueOptions::default() };
    let file = SwapFile::create(folder.path(), (3 * bytes) as u64).unwrap();
    for (code, after) in [(libc::EIO, 0), (libc::EIO, 5), (libc::ENOSPC, 0), (libc::ENOSPC, 7)] {
        for what in ["read", "write"] {
            let queue = Queue::over(Arc::new(Failing { left: AtomicUsize::new(after), code }), options);
            let begin = |index: usize| {
                let (offset, buffer) = ((index * bytes) as u64, Buffer::new(bytes));
                match what {
                    "read" => queue.read(&file, offset, buffer, bytes),
                    _ => queue.write(&file, offset, buffer, bytes),
                }
            };
            let operations: Vec<_> = (0..3).map(|index| begin(index).unwrap()).collect();
            let outcomes: Vec<_> = operations.into_iter().map(|operation| operation.wait()).collect();
            let failure = outcomes.into_iter().find_map(Result::err).expect("the layer failed");
            let IoError::Transfer { what: found, file, offset, length, why } = &failure else {
                panic!("{failure}")
            };
            assert_eq!((*found, file.as_path(), why.raw_os_error()), (what, folder.path(), Some(code)));
            assert!(offset + *length as u64 <= 3 * bytes as u64 && *length <= 2 * ALIGNMENT, "{failure}");
        }
    }
}

#[test]
fn a_file_that_was_cut_short_is_an_error_and_not_zeros() {
    let folder = tempfile::tempdir().unwrap();
    for uring in [true, false] {
        let queue = Queue::new(QueueOptions { uring, ..QueueOptions::default() });
        let file = SwapFile::create(folder.path(), 8 * ALIGNMENT as u64).unwrap();
        cut_short(folder.path());
        let error =
            queue.read(&file, 0, Buffer::new(8 * ALIGNMENT), 8 * ALIGNMENT).unwrap().wait().unwrap_err();
        assert!(matches!(error, IoError::Transfer { what: "read", .. }), "{error}");
    }
}

/// Takes the content of this process's files without a name in a folder.
fn cut_short(folder: &std::path::Path) {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let of_folder = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.starts_with(folder) && target != folder)
    };
    let cut = open.filter(of_folder).map(|path| File::options().write(true).open(path).unwrap().set_len(0));
    assert!(cut.map(Result::unwrap).count() > 0);
}

/// Turns over a bit of this process's files without a name in a folder.
fn flip(folder: &std::path::Path, bit: u64) {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    for path in open {
        if std::fs::read_link(&path).is_ok_and(|target| target.starts_with(folder) && target != folder) {
            let file = File::options().read(true).write(true).open(path).unwrap();
            let mut byte = [0u8];
            file.read_exact_at(&mut byte, bit / 8).unwrap();
            byte[0] ^= 1 << (bit % 8);
            file.write_all_at(&byte, bit / 8).unwrap();
        }
    }
}

#[test]
fn a_bit_that_turns_over_on_the_disk_is_noticed_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (bytes, offset) = (10 * ALIGNMENT, 2 * ALIGNMENT as u64);
    let options = QueueOptions { block_bytes: 4 * ALIGNMENT, ..QueueOptions::default() };
    let pieces = || Queue::over(Arc::new(Failing { left: AtomicUsize::new(usize::MAX), code: 0 }), options);
    for queue in [Queue::new(options), Queue::new(QueueOptions { uring: false, ..options }), pieces()] {
        let file = SwapFile::create(folder.path(), 16 * ALIGNMENT as u64).unwrap();
        let write = |value: u8| {
            let mut buffer = Buffer::new(bytes);
            buffer.bytes_mut().fill(value);
            queue.write(&file, offset, buffer, bytes).unwrap().wait().unwrap();
        };
        let read = || queue.read(&file, offset, Buffer::new(bytes), bytes).unwrap().wait();
        write(7);
        for byte in [0, 5 * ALIGNMENT, bytes - 1] {
            let bit = 8 * (offset + byte as u64) + 5;
            flip(folder.path(), bit);
            let error = read().map(drop).unwrap_err();
            let IoError::Damaged { folder: named, offset: at, length } = &error else { panic!("{error}") };
            let place = offset + byte as u64;
            assert!(named == folder.path() && (*at..*at + *length as u64).contains(&place), "{error}");
            flip(folder.path(), bit);
            assert!(read().unwrap().bytes().iter().all(|byte| *byte == 7));
        }
        // What is written over a damaged place is what counts.
        flip(folder.path(), 8 * offset);
        write(9);
        assert!(read().unwrap().bytes().iter().all(|byte| *byte == 9));
    }
}

/// A disk that answers when told.
struct Silent(Mutex<Receiver<()>>);

impl Layer for Silent {
    fn read_at(&self, _: &File, bytes: &mut [u8], _: u64) -> std::io::Result<usize> {
        let _ = self.0.lock().unwrap().recv();
        Ok(bytes.len())
    }

    fn write_at(&self, _: &File, bytes: &[u8], _: u64) -> std::io::Result<usize> {
        Ok(bytes.len())
    }
}

#[test]
fn a_disk_that_never_answers_is_given_up_at_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let file = SwapFile::create(folder.path(), ALIGNMENT as u64).unwrap();
    let (answer, silent) = channel();
    let options = QueueOptions { deadline: Duration::from_millis(50), ..QueueOptions::default() };
    let queue = Queue::over(Arc::new(Silent(Mutex::new(silent))), options);
    let begin = Instant::now();
    let error = queue.read(&file, 0, Buffer::new(1), 1).unwrap().wait().unwrap_err();
    assert!(matches!(&error, IoError::Transfer { why, .. } if why.raw_os_error() == Some(libc::ETIMEDOUT)));
    drop(queue.read(&file, 0, Buffer::new(1), 1).unwrap());
    drop(queue);
    assert!(begin.elapsed() < Duration::from_secs(60));
    drop(answer);
}

#[test]
fn a_limit_on_files_is_named_and_sends_no_signal() {
    // The limit is the whole process's, so a process of its own has it.
    if std::env::var_os("FERROSPEED_TEST_LIMIT").is_none() {
        let output = child::alone(module_path!(), "a_limit_on_files_is_named_and_sends_no_signal")
            .env("FERROSPEED_TEST_LIMIT", "1")
            .output()
            .unwrap();
        child::assert_passed(&output);
        return;
    }
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: a call with a limit that outlives it.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    let folder = tempfile::tempdir().unwrap();
    let error = SwapFile::create(folder.path(), 2 << 20).unwrap_err();
    assert!(error.to_string().contains("ulimit -f"), "{error}");
    SwapFile::create(folder.path(), 1 << 20).unwrap();
}

/// Forbids this thread, and those it starts, one system call.
fn forbid(call: libc::c_long) {
    let statement = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, refused),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: calls with numbers, and with a program that outlives them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let outcome = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program);
        assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
    }
}

/// What is logged, to be looked at.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What is logged by work on a thread that may not make a system call.
fn said_without(call: libc::c_long, work: impl FnOnce() + Send + 'static) -> String {
    let thread = std::thread::spawn(move || {
        forbid(call);
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, work);
        String::from_utf8(log.0.lock().unwrap().clone()).unwrap()
    });
    thread.join().unwrap()
}

#[test]
fn without_io_uring_threads_do_the_work_and_it_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let said = said_without(libc::SYS_io_uring_setup, move || {
        for _ in 0..3 {
            let queue = Queue::new(QueueOptions::default());
            assert!(queue.why_threads().unwrap().contains("seccomp"), "{:?}", queue.why_threads());
            let file = SwapFile::create(folder.path(), ALIGNMENT as u64).unwrap();
            let mut buffer = Buffer::new(ALIGNMENT);
            buffer.bytes_mut().fill(7);
            queue.write(&file, 0, buffer, ALIGNMENT).unwrap().wait().unwrap();
            let read = queue.read(&file, 0, Buffer::new(ALIGNMENT), ALIGNMENT).unwrap().wait().unwrap();
            assert_eq!(read.bytes(), [7; ALIGNMENT]);
        }
    });
    assert_eq!(said.matches("io_uring is not permitted").count(), 1, "{said}");
}

#[test]
fn memory_that_cannot_be_locked_is_used_as_it_is_and_that_is_said_once() {
    let said = said_without(libc::SYS_mlock, || {
        for _ in 0..3 {
            let mut buffer = Buffer::locked(ALIGNMENT);
            assert!(!buffer.is_locked());
            buffer.bytes_mut().fill(7);
        }
    });
    assert_eq!(said.matches("ulimit -l").count(), 1, "{said}");
    assert!(Buffer::locked(ALIGNMENT).is_locked(), "one page may be locked anywhere");
}
