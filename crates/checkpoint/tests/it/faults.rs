//! What is on the disk after a save that failed: the old checkpoint, or the new one, whole.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrospeed_checkpoint::{
    Checkpoint, CheckpointError, Contents, Disk, Dtype, FileSystem, Kind, Origin, PieceSpec, Result,
    Retention, Target, TrainingState, list, resolve, save,
};
use ferrospeed_comm::World;
use serde_json::{Value, json};

/// What happens from the n-th operation on.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    /// One operation is refused.
    Error,
    /// It and everything after it never happens, as after `kill -9`; a write that dies leaves half of its bytes.
    Death,
}

struct Failing {
    at: usize,
    mode: Mode,
    count: AtomicUsize,
    available: u64,
}

impl Failing {
    fn new(at: usize, mode: Mode) -> Failing {
        Failing { at, mode, count: AtomicUsize::new(0), available: u64::MAX }
    }

    fn fails(&self) -> std::io::Result<()> {
        let number = self.count.fetch_add(1, Ordering::SeqCst);
        let fails = match self.mode {
            Mode::Error => number == self.at,
            Mode::Death => number >= self.at,
        };
        if fails { Err(std::io::Error::other("injected")) } else { Ok(()) }
    }
}

impl FileSystem for Failing {
    fn create_folder(&self, path: &Path) -> std::io::Result<()> {
        self.fails()?;
        Disk.create_folder(path)
    }
    fn create_file(&self, path: &Path) -> std::io::Result<File> {
        self.fails()?;
        Disk.create_file(path)
    }
    fn write(&self, file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
        if let Err(error) = self.fails() {
            Disk.write(file, &bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        Disk.write(file, bytes)
    }
    fn sync_file(&self, file: &File) -> std::io::Result<()> {
        self.fails()?;
        Disk.sync_file(file)
    }
    fn sync_folder(&self, path: &Path) -> std::io::Result<()> {
        self.fails()?;
        Disk.sync_folder(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.fails()?;
        Disk.rename(from, to)
    }
    fn remove_folder(&self, path: &Path) -> std::io::Result<()> {
        self.fails()?;
        Disk.remove_folder(path)
    }
    fn available_bytes(&self, _: &Path) -> std::io::Result<u64> {
        Ok(self.available)
    }
}

const NUMEL: u64 = 1000;

fn contents(steps: u64) -> Contents {
    Contents {
        origin: Origin { ranks: 1, stage: 0, dtype: Dtype::F32, optimizer: None, kernels: None },
        training: TrainingState { global_steps: steps, ..Default::default() },
        client_state: Value::Null,
        config: json!({}),
        aliases: Default::default(),
    }
}

/// Saves one tensor, whose every element is `value`, from as many ranks as there are file systems.
fn save_on(
    dir: &Path,
    tag: &str,
    value: u64,
    disks: Vec<Arc<dyn FileSystem>>,
    retention: Retention,
) -> Vec<Result<PathBuf>> {
    let ranks = disks.len() as u64;
    let threads: Vec<_> = World::threads(disks.len())
        .into_iter()
        .zip(disks)
        .map(|(world, fs)| {
            let (dir, tag) = (dir.to_path_buf(), tag.to_owned());
            std::thread::spawn(move || {
                let share = NUMEL / ranks;
                let spec = PieceSpec {
                    name: "w".into(),
                    kind: Kind::Master,
                    shape: vec![NUMEL],
                    dtype: Dtype::F32,
                    place: 0,
                    part: None,
                    start: world.rank() as u64 * share,
                    len: share,
                };
                let target = Target { dir: &dir, tag: &tag, update_latest: true, retention, fs: &*fs };
                let mut bytes = |_: usize, range: Range<u64>, out: &mut Vec<u8>| {
                    range.for_each(|_| out.extend_from_slice(&(value as f32).to_le_bytes()));
                    Ok(())
                };
                save(&world.group(), &target, contents(value), &[spec], &mut bytes)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn save_one(dir: &Path, tag: &str, value: u64, fs: Arc<dyn FileSystem>) -> Result<PathBuf> {
    save_on(dir, tag, value, vec![fs], Retention::default()).remove(0)
}

/// The value of the checkpoint that a load would find, after comparing every checksum.
fn found(dir: &Path, tag: Option<&str>) -> f32 {
    let checkpoint = Checkpoint::open(&resolve(dir, tag).unwrap()).unwrap();
    checkpoint.verify().unwrap();
    let mut values = vec![0.0; NUMEL as usize];
    checkpoint.read_f32(checkpoint.weights("w").unwrap(), 0..NUMEL, &mut values).unwrap();
    assert!(values.iter().all(|value| *value == values[0]), "a mixture of two checkpoints");
    values[0]
}

fn leftovers(dir: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.') && !name.ends_with(".lock")).collect()
}

#[test]
fn a_save_that_fails_anywhere_leaves_the_old_or_the_new_checkpoint_whole() {
    for mode in [Mode::Error, Mode::Death] {
        // A new tag beside the old one, and a new one in the place of the old one.
        for tag in ["new", "old"] {
            let mut failures = 0;
            for at in 0.. {
                let dir = tempfile::tempdir().unwrap();
                save_one(dir.path(), "old", 1, Arc::new(Disk)).unwrap();
                let failing = Arc::new(Failing::new(at, mode));
                let outcome = save_one(dir.path(), tag, 2, failing.clone());
                let value = found(dir.path(), None);
                assert!(value == 1.0 || value == 2.0);
                if outcome.is_ok() {
                    assert_eq!(value, 2.0, "operation {at}: a save that succeeded is found");
                }
                assert!(
                    [1.0, 2.0].contains(&found(dir.path(), Some("old"))),
                    "operation {at}: the old tag is not lost"
                );
                // The next save sweeps up and works.
                save_one(dir.path(), "next", 3, Arc::new(Disk)).unwrap();
                assert_eq!(found(dir.path(), None), 3.0);
                assert_eq!(leftovers(dir.path()), Vec::<String>::new(), "operation {at}");
                assert!([1.0, 2.0].contains(&found(dir.path(), Some("old"))));
                failures += usize::from(outcome.is_err());
                if failing.count.load(Ordering::SeqCst) <= at {
                    break;
                }
            }
            assert!(failures > 8, "{failures} operations failed");
        }
    }
}

#[test]
fn a_rank_that_fails_fails_the_save_on_every_rank() {
    for failing_rank in 0..2 {
        for at in 0..4 {
            let dir = tempfile::tempdir().unwrap();
            let good = || -> Arc<dyn FileSystem> { Arc::new(Disk) };
            let saved = save_on(dir.path(), "old", 1, vec![good(), good()], Retention::default());
            assert!(saved.iter().all(Result::is_ok));
            let mut disks = vec![good(), good()];
            disks[failing_rank] = Arc::new(Failing::new(at, Mode::Error));
            let outcomes = save_on(dir.path(), "new", 2, disks, Retention::default());
            if outcomes[failing_rank].is_ok() {
                continue;
            }
            let other = outcomes[1 - failing_rank].as_ref().unwrap_err();
            assert!(
                matches!(other, CheckpointError::Peer { rank, why } if *rank == failing_rank && why.contains("injected")),
                "{other}"
            );
            assert_eq!(found(dir.path(), None), 1.0);
            assert_eq!(leftovers(dir.path()), Vec::<String>::new());
        }
    }
}

#[test]
fn damage_is_named_with_file_tensor_and_offset() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_one(dir.path(), "t", 1, Arc::new(Disk)).unwrap();
    let file = path.join("rank_00000.safetensors");
    let good = std::fs::read(&file).unwrap();
    let data = good.len() as u64 - NUMEL * 4;

    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &flipped).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let error = checkpoint.read_f32(checkpoint.weights("w").unwrap(), 0..1, &mut [0.0]).unwrap_err();
    assert!(matches!(&error, CheckpointError::Damaged { start, .. } if *start == data), "{error}");
    assert!(
        error.to_string().contains("rank_00000.safetensors") && error.to_string().contains("'w"),
        "{error}"
    );
    assert!(checkpoint.verify().is_err());

    let mut flipped = good.clone();
    flipped[20] ^= 1;
    std::fs::write(&file, &flipped).unwrap();
    let error = Checkpoint::open(&path).unwrap().verify().unwrap_err().to_string();
    assert!(error.contains("header is damaged"), "{error}");

    std::fs::write(&file, &good[..good.len() - 1]).unwrap();
    let error = Checkpoint::open(&path).err().unwrap().to_string();
    assert!(error.contains("cut short"), "{error}");
    std::fs::remove_file(&file).unwrap();
    let error = Checkpoint::open(&path).err().unwrap().to_string();
    assert!(error.contains("rank_00000.safetensors"), "{error}");
    assert!(matches!(resolve(dir.path(), None), Err(CheckpointError::NotFound { .. })));
}

#[test]
fn latest_is_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    save_one(dir.path(), "a", 1, Arc::new(Disk)).unwrap();
    save_one(dir.path(), "b", 2, Arc::new(Disk)).unwrap();
    assert_eq!(std::fs::read_to_string(dir.path().join("latest")).unwrap(), "b");
    for hint in ["gone", "../b", "", "a/../b", "b\nb"] {
        std::fs::write(dir.path().join("latest"), hint).unwrap();
        assert_eq!(found(dir.path(), None), 2.0, "latest says '{hint}'");
    }
    std::fs::remove_file(dir.path().join("latest")).unwrap();
    assert_eq!(found(dir.path(), None), 2.0);
    std::fs::write(dir.path().join("latest"), "a").unwrap();
    assert_eq!(found(dir.path(), None), 1.0, "a hint that holds is followed");
}

#[test]
fn rotation_keeps_the_newest_and_the_marked() {
    let dir = tempfile::tempdir().unwrap();
    let rules = Retention { keep_last: Some(2), keep_every_steps: Some(4) };
    for step in 1..=9 {
        save_on(dir.path(), &format!("step{step}"), step, vec![Arc::new(Disk)], rules).remove(0).unwrap();
    }
    let tags: Vec<String> = list(dir.path()).unwrap().into_iter().map(|listed| listed.tag).collect();
    assert_eq!(tags, ["step4", "step8", "step9"]);
    let nothing = Retention { keep_last: Some(0), keep_every_steps: None };
    save_on(dir.path(), "last", 10, vec![Arc::new(Disk)], nothing).remove(0).unwrap();
    assert_eq!(found(dir.path(), None), 10.0, "the last good one stays");
}

#[test]
fn what_cannot_be_saved_is_refused_before_a_byte_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let full = Failing { available: 100, ..Failing::new(usize::MAX, Mode::Error) };
    let error = save_one(dir.path(), "t", 1, Arc::new(full)).unwrap_err();
    let CheckpointError::NoSpace { needed_bytes, available_bytes: 100, .. } = error else {
        panic!("{error}")
    };
    // What is written, and what is left free beside it, are told apart.
    assert!(needed_bytes > 0 && needed_bytes < 1 << 20, "{needed_bytes}");
    assert!(
        error.to_string().contains("bytes and needs 1024 KiB beside them, 100 bytes are free"),
        "{error}"
    );
    for tag in ["", ".hidden", "a/b", "..", "latest"] {
        let error = save_one(dir.path(), tag, 1, Arc::new(Disk)).unwrap_err();
        assert!(matches!(error, CheckpointError::Tag { .. }), "{error}");
    }
    // Somebody else's folder is not replaced.
    std::fs::create_dir(dir.path().join("mine")).unwrap();
    let error = save_one(dir.path(), "mine", 1, Arc::new(Disk)).unwrap_err().to_string();
    assert!(error.contains("will not be replaced"), "{error}");
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
}

#[test]
fn a_second_writer_in_the_same_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    save_one(dir.path(), "t", 1, Arc::new(Disk)).unwrap();
    let lock = File::open(dir.path().join(".ferrospeed.lock")).unwrap();
    lock.lock().unwrap();
    let error = save_one(dir.path(), "u", 2, Arc::new(Disk)).unwrap_err();
    assert!(matches!(error, CheckpointError::Busy { .. }), "{error}");
    drop(lock);
    save_one(dir.path(), "u", 2, Arc::new(Disk)).unwrap();
}

#[test]
fn manifests_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_one(dir.path(), "t", 1, Arc::new(Disk)).unwrap();
    let manifest = path.join("manifest.json");
    let good: Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    let lies: [(&str, fn(&mut Value), &str); 9] = [
        ("overlap", |m| m["tensors"][0]["pieces"][0]["start"] = 1.into(), "gap"),
        ("short", |m| m["tensors"][0]["pieces"][0]["len"] = 10.into(), "lacks"),
        ("absurd", |m| m["tensors"][0]["shape"] = json!([u64::MAX, 8]), "absurd"),
        ("outside", |m| m["tensors"][0]["pieces"][0]["offset"] = u64::MAX.into(), "ends after"),
        ("escape", |m| m["files"][0]["name"] = "../x".into(), "outside"),
        ("no file", |m| m["tensors"][0]["pieces"][0]["file"] = 9.into(), "not listed"),
        ("checksums", |m| m["tensors"][0]["pieces"][0]["crc32"] = json!([]), "checksums"),
        ("version", |m| m["version"] = 99.into(), "newer"),
        (
            "twice",
            |m| {
                let t = m["tensors"][0].clone();
                m["tensors"].as_array_mut().unwrap().push(t)
            },
            "twice",
        ),
    ];
    for (what, lie, message) in lies {
        let mut manifest_value = good.clone();
        lie(&mut manifest_value);
        let refused =
            || Checkpoint::open(&path).err().unwrap_or_else(|| panic!("{what} was accepted")).to_string();
        std::fs::write(&manifest, manifest_value.to_string()).unwrap();
        if what != "version" {
            assert!(refused().contains("was changed after it was written"), "{what}: {}", refused());
        }
        // One who knows how can make the checksum fit: then what it says is looked at.
        manifest_value.as_object_mut().unwrap().remove("checksum");
        let sum = crc32fast::hash(manifest_value.to_string().as_bytes());
        manifest_value["checksum"] = format!("{sum:08x}").into();
        std::fs::write(&manifest, manifest_value.to_string()).unwrap();
        assert!(refused().contains(message), "{what}: {}", refused());
    }
}

#[test]
fn a_manifest_with_any_bit_turned_over_is_refused_or_says_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_one(dir.path(), "t", 1, Arc::new(Disk)).unwrap();
    let manifest = path.join("manifest.json");
    let good = std::fs::read(&manifest).unwrap();
    let said = format!("{:?}", Checkpoint::open(&path).unwrap().manifest());
    let mut refused = 0;
    for at in 0..good.len() {
        let mut flipped = good.clone();
        flipped[at] ^= 1 << (at % 8);
        std::fs::write(&manifest, &flipped).unwrap();
        match Checkpoint::open(&path) {
            Ok(opened) => assert_eq!(format!("{:?}", opened.manifest()), said, "byte {at}"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > good.len() / 2, "{refused} of {} were refused", good.len());
    // What was written before manifests had a checksum still loads.
    let mut old: Value = serde_json::from_slice(&good).unwrap();
    old.as_object_mut().unwrap().remove("checksum");
    std::fs::write(&manifest, old.to_string()).unwrap();
    Checkpoint::open(&path).err().expect("a checksum that was taken out is missed");
    old["version"] = 1.into();
    std::fs::write(&manifest, old.to_string()).unwrap();
    Checkpoint::open(&path).unwrap();
}
