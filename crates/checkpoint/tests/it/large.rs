//! Files of many blocks: what goes past the system's cache, in whole pages, is what was given, to the last byte.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferrospeed_checkpoint::{
    Checkpoint, CheckpointError, Contents, Disk, Dtype, FileSystem, Kind, Origin, PieceSpec, Readers, Result,
    Retention, Target, TrainingState, Wanted, save,
};
use ferrospeed_comm::World;
use ferrospeed_io::{Layer, Queue, QueueOptions, System};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// A disk with a fault.
enum Faulty {
    /// It takes nothing past the cache, as some file systems do, and says so only when it is written to.
    CachedOnly { refused: AtomicBool },
    /// It is full after so many bytes of large files.
    Full { left: Arc<AtomicU64> },
}

/// The way to a disk that is full at some point.
struct UntilFull(Arc<AtomicU64>);

impl Layer for UntilFull {
    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<usize> {
        System.read_at(file, bytes, offset)
    }
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> std::io::Result<usize> {
        let take = |left: u64| left.checked_sub(bytes.len() as u64);
        match self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take) {
            Ok(_) => System.write_at(file, bytes, offset),
            Err(_) => Err(nix::errno::Errno::ENOSPC.into()),
        }
    }
}

impl FileSystem for Faulty {
    fn create_folder(&self, path: &Path) -> std::io::Result<()> {
        Disk.create_folder(path)
    }
    fn create_file(&self, path: &Path) -> std::io::Result<File> {
        Disk.create_file(path)
    }
    fn write(&self, file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
        let flags = OFlag::from_bits_truncate(fcntl(&*file, FcntlArg::F_GETFL)?);
        if let (Faulty::CachedOnly { refused }, true) = (self, flags.contains(OFlag::O_DIRECT)) {
            refused.store(true, Ordering::SeqCst);
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        Disk.write(file, bytes)
    }
    fn queue(&self) -> Queue {
        match self {
            Faulty::CachedOnly { .. } => Disk.queue(),
            Faulty::Full { left } => Queue::over(Arc::new(UntilFull(left.clone())), QueueOptions::default()),
        }
    }
    fn sync_file(&self, file: &File) -> std::io::Result<()> {
        Disk.sync_file(file)
    }
    fn sync_folder(&self, path: &Path) -> std::io::Result<()> {
        Disk.sync_folder(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        Disk.rename(from, to)
    }
    fn remove_folder(&self, path: &Path) -> std::io::Result<()> {
        Disk.remove_folder(path)
    }
    fn available_bytes(&self, path: &Path) -> std::io::Result<u64> {
        Disk.available_bytes(path)
    }
}

/// Lengths that fill no page and no block: an odd byte moves all that follows it off every boundary.
fn tensors() -> Vec<(String, Dtype, u64)> {
    let mut tensors = vec![
        ("odd".to_owned(), Dtype::U8, 1),
        ("large".to_owned(), Dtype::F32, 5_000_003),
        ("empty".to_owned(), Dtype::F32, 0),
        ("half".to_owned(), Dtype::F16, 3_000_001),
        ("block".to_owned(), Dtype::F32, 1 << 20),
    ];
    tensors.extend((0..300).map(|index| (format!("small.{index}"), Dtype::F32, 1 + index * 7)));
    tensors
}

/// The byte at a place of a tensor: every place has its own pattern.
fn byte(tensor: usize, at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(tensor as u64 * 77) >> 56) as u8
}

fn save_all(dir: &Path, fs: Arc<dyn FileSystem>) {
    try_to_save(dir, fs).into_iter().for_each(|outcome| outcome.unwrap());
}

/// What came of it on each rank.
fn try_to_save(dir: &Path, fs: Arc<dyn FileSystem>) -> Vec<Result<()>> {
    let threads: Vec<_> = World::threads(2)
        .into_iter()
        .map(|world| {
            let (dir, fs) = (dir.to_path_buf(), Arc::clone(&fs));
            std::thread::spawn(move || {
                let (rank, ranks) = (world.rank() as u64, world.size() as u64);
                let specs = tensors().into_iter().enumerate().map(|(place, (name, dtype, numel))| {
                    let start = numel * rank / ranks;
                    let len = numel * (rank + 1) / ranks - start;
                    let (kind, shape) = (Kind::Weight, vec![numel]);
                    PieceSpec { name, kind, shape, dtype, place: place as u64, part: None, start, len }
                });
                let specs: Vec<PieceSpec> = specs.collect();
                let contents = Contents {
                    origin: Origin { ranks: 2, stage: 2, dtype: Dtype::F32, optimizer: None, kernels: None },
                    training: TrainingState::default(),
                    client_state: serde_json::Value::Null,
                    config: serde_json::Value::Null,
                    aliases: Default::default(),
                };
                let retention = Retention::default();
                let target = Target { dir: &dir, tag: "large", update_latest: true, retention, fs: &*fs };
                let mut bytes = |piece: usize, range: Range<u64>, out: &mut Vec<u8>| {
                    let size = specs[piece].dtype.size_bytes();
                    let first = specs[piece].start * size;
                    out.extend((range.start * size..range.end * size).map(|at| byte(piece, first + at)));
                    Ok(())
                };
                save(&world.group(), &target, contents, &specs, &mut bytes).map(drop)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn check_all(dir: &Path) {
    let checkpoint = Checkpoint::open(&dir.join("large")).unwrap();
    checkpoint.verify().unwrap();
    for (place, (name, dtype, numel)) in tensors().into_iter().enumerate() {
        let entry = checkpoint.weights(&name).unwrap();
        let size = dtype.size_bytes();
        for range in [0..numel, numel / 3..numel - numel / 4, numel..numel] {
            let mut found = Vec::new();
            checkpoint.read_bytes(entry, range.clone(), &mut found).unwrap();
            let expected: Vec<u8> =
                (range.start * size..range.end * size).map(|at| byte(place, at)).collect();
            assert!(found == expected, "{name} {range:?}");
        }
    }
}

#[test]
fn what_is_written_past_the_cache_reads_back_whole_and_in_part() {
    let dir = tempfile::tempdir().unwrap();
    save_all(dir.path(), Arc::new(Disk));
    check_all(dir.path());
}

#[test]
fn a_disk_that_takes_nothing_past_the_cache_is_written_through_it() {
    let dir = tempfile::tempdir().unwrap();
    let fs = Arc::new(Faulty::CachedOnly { refused: AtomicBool::new(false) });
    save_all(dir.path(), Arc::clone(&fs) as Arc<dyn FileSystem>);
    check_all(dir.path());
    let Faulty::CachedOnly { refused } = &*fs else { return };
    // In a folder in memory nothing is ever tried past the cache.
    let memory =
        nix::sys::statfs::statfs(dir.path()).unwrap().filesystem_type() == nix::sys::statfs::TMPFS_MAGIC;
    assert!(refused.load(Ordering::SeqCst) || memory);
}

#[test]
fn a_disk_that_is_full_far_into_a_large_file_is_told_with_the_file_and_leaves_the_old_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    save_all(dir.path(), Arc::new(Disk));
    let left = Arc::new(AtomicU64::new(20 << 20));
    let outcomes = try_to_save(dir.path(), Arc::new(Faulty::Full { left }));
    let errors: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    let tells = |error: &String| error.contains("No space left") && error.contains(".safetensors");
    assert!(errors.iter().any(tells), "{errors:?}");
    check_all(dir.path());
}

#[test]
fn several_stretches_come_in_the_order_in_which_they_were_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    save_all(dir.path(), Arc::new(Disk));
    let checkpoint = Checkpoint::open(&dir.path().join("large")).unwrap();
    for readers in [Readers::This, Readers::Several] {
        let names = ["block", "small.299", "large", "small.7", "large"];
        let wanted: Vec<Wanted<'_>> = names
            .iter()
            .map(|name| checkpoint.weights(name).unwrap())
            .map(|tensor| Wanted {
                tensor,
                part: None,
                elements: tensor.numel() / 5..tensor.numel(),
                readers,
            })
            .collect();
        let mut found: Vec<Vec<f32>> = vec![Vec::new(); wanted.len()];
        let mut last = 0;
        checkpoint
            .each_f32(&wanted, &mut |index, values| {
                assert!(index >= last, "{index} after {last}");
                last = index;
                found[index].extend_from_slice(values);
                Ok(())
            })
            .unwrap();
        for (wanted, found) in wanted.iter().zip(found) {
            let mut expected = vec![0.0; found.len()];
            checkpoint.read_f32(wanted.tensor, wanted.elements.clone(), &mut expected).unwrap();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&expected), "{}", wanted.tensor.name);
        }
    }
}

#[test]
fn damage_far_into_a_large_file_is_found_and_a_failing_reader_ends_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    save_all(dir.path(), Arc::new(Disk));
    let path = dir.path().join("large/rank_00001.safetensors");
    let checkpoint = Checkpoint::open(&dir.path().join("large")).unwrap();
    let tensor = checkpoint.weights("block").unwrap();
    let stopped = checkpoint.each_f32(&[Wanted::of(tensor, 0..tensor.numel())], &mut |_, _| {
        Err(CheckpointError::Request("enough".into()))
    });
    assert_eq!(stopped.unwrap_err().to_string(), "enough");

    let offset = tensor.pieces[1].offset + 5;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[offset as usize] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = checkpoint.verify().unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Damaged { tensor, start, end, .. }
        if tensor.starts_with("block") && (*start..*end).contains(&offset)),
        "{error}"
    );
}
