//! A power failure takes what was written and never synced. Each save runs on a disk that remembers what has reached it;
//! after every operation the power goes, and what is left must hold the old checkpoint or the new one, whole.
//!
//! Two failures are tried at every point, between which real ones lie: everything unsynced is gone (a file is as it was at
//! its last `fsync`, a folder has the entries of its last `fsync`), and all names have arrived but no unsynced content.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ferrospeed_checkpoint::{
    Checkpoint, Contents, Disk, Dtype, FileSystem, Kind, Origin, PieceSpec, Result, Retention, Target,
    TrainingState, resolve, save,
};
use ferrospeed_comm::World;
use serde_json::{Value, json};

/// A file or folder as it is now and as the disk has it.
enum Node {
    File { synced: Vec<u8> },
    Folder { now: BTreeMap<String, usize>, synced: BTreeMap<String, usize> },
}

/// What survives.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Survives {
    /// What was synced.
    Synced,
    /// All names, and of each file's content what was synced.
    Names,
}

struct Memory {
    nodes: Vec<Node>,
    /// The file behind an open handle, by its inode.
    open: HashMap<u64, usize>,
    operations: usize,
}

/// A disk of which everything below `root` is watched. What it is asked to sync it only remembers: that is quicker.
struct Watched {
    root: PathBuf,
    /// The power goes before this operation.
    until: usize,
    memory: Mutex<Memory>,
}

fn empty_folder() -> Node {
    Node::Folder { now: BTreeMap::new(), synced: BTreeMap::new() }
}

impl Watched {
    fn new(root: &Path, until: usize) -> Watched {
        let mut nodes = Vec::new();
        already_there(root, &mut nodes);
        let memory = Memory { nodes, open: HashMap::new(), operations: 0 };
        Watched { root: root.to_path_buf(), until, memory: Mutex::new(memory) }
    }

    /// Does an operation unless the power is gone, and notes it.
    fn operate<T>(
        &self,
        operation: impl FnOnce() -> std::io::Result<T>,
        note: impl FnOnce(&mut Memory, &T),
    ) -> std::io::Result<T> {
        let mut memory = self.memory.lock().unwrap();
        if memory.operations == self.until {
            return Err(std::io::Error::other("the power is gone"));
        }
        memory.operations += 1;
        let done = operation()?;
        note(&mut memory, &done);
        Ok(done)
    }

    fn names(&self, path: &Path) -> Vec<String> {
        let below = path.strip_prefix(&self.root).unwrap();
        below.iter().map(|name| name.to_str().unwrap().to_owned()).collect()
    }

    /// The folder that holds a path, and the path's name in it.
    fn place(&self, memory: &Memory, path: &Path) -> (usize, String) {
        let mut names = self.names(path);
        let name = names.pop().expect("the root has no name");
        (names.iter().fold(0, |folder, name| memory.entries(folder)[name]), name)
    }

    /// Makes what is left after the failure.
    fn remains(&self, survives: Survives, to: &Path) {
        self.memory.lock().unwrap().write(0, survives, to);
    }
}

/// Notes what is below a folder before anything happens: all of it has reached the disk.
fn already_there(path: &Path, nodes: &mut Vec<Node>) -> usize {
    let own = nodes.len();
    if path.is_file() {
        nodes.push(Node::File { synced: std::fs::read(path).unwrap() });
        return own;
    }
    nodes.push(empty_folder());
    let entries: BTreeMap<String, usize> = std::fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), already_there(&entry.path(), nodes)))
        .collect();
    nodes[own] = Node::Folder { now: entries.clone(), synced: entries };
    own
}

impl Memory {
    fn entries(&self, folder: usize) -> &BTreeMap<String, usize> {
        let Node::Folder { now, .. } = &self.nodes[folder] else { panic!("a file has no entries") };
        now
    }

    fn entries_mut(&mut self, folder: usize) -> &mut BTreeMap<String, usize> {
        let Node::Folder { now, .. } = &mut self.nodes[folder] else { panic!("a file has no entries") };
        now
    }

    fn add(&mut self, folder: usize, name: String, node: Node) -> usize {
        self.nodes.push(node);
        let own = self.nodes.len() - 1;
        self.entries_mut(folder).insert(name, own);
        own
    }

    fn write(&self, node: usize, survives: Survives, to: &Path) {
        match &self.nodes[node] {
            Node::File { synced } => std::fs::write(to, synced).unwrap(),
            Node::Folder { now, synced } => {
                std::fs::create_dir_all(to).unwrap();
                let entries = if survives == Survives::Names { now } else { synced };
                entries.iter().for_each(|(name, node)| self.write(*node, survives, &to.join(name)));
            }
        }
    }
}

impl FileSystem for Watched {
    fn create_folder(&self, path: &Path) -> std::io::Result<()> {
        self.operate(
            || Disk.create_folder(path),
            |memory, ()| {
                self.names(path).into_iter().fold(0, |folder, name| {
                    match memory.entries(folder).get(&name) {
                        Some(there) => *there,
                        None => memory.add(folder, name, empty_folder()),
                    }
                });
            },
        )
    }

    fn create_file(&self, path: &Path) -> std::io::Result<File> {
        self.operate(
            || Disk.create_file(path),
            |memory, file| {
                let (folder, name) = self.place(memory, path);
                let node = memory.add(folder, name, Node::File { synced: Vec::new() });
                memory.open.insert(file.metadata().unwrap().ino(), node);
            },
        )
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
        self.operate(|| Disk.write(file, bytes), |_, ()| ())
    }

    fn sync_file(&self, file: &File) -> std::io::Result<()> {
        let number = std::os::fd::AsRawFd::as_raw_fd(file);
        self.operate(
            || Ok(()),
            |memory, ()| {
                let node = memory.open[&file.metadata().unwrap().ino()];
                let content = std::fs::read(format!("/proc/self/fd/{number}")).unwrap();
                memory.nodes[node] = Node::File { synced: content };
            },
        )
    }

    fn sync_folder(&self, path: &Path) -> std::io::Result<()> {
        self.operate(
            || Ok(()),
            |memory, ()| {
                let folder = self.names(path).iter().fold(0, |folder, name| memory.entries(folder)[name]);
                let Node::Folder { now, synced } = &mut memory.nodes[folder] else { panic!("it is a file") };
                synced.clone_from(now);
            },
        )
    }

    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.operate(
            || Disk.rename(from, to),
            |memory, ()| {
                let (folder, name) = self.place(memory, from);
                let node = memory.entries_mut(folder).remove(&name).unwrap();
                let (folder, name) = self.place(memory, to);
                memory.entries_mut(folder).insert(name, node);
            },
        )
    }

    fn remove_folder(&self, path: &Path) -> std::io::Result<()> {
        self.operate(
            || Disk.remove_folder(path),
            |memory, ()| {
                let (folder, name) = self.place(memory, path);
                memory.entries_mut(folder).remove(&name);
            },
        )
    }

    fn available_bytes(&self, _: &Path) -> std::io::Result<u64> {
        Ok(u64::MAX)
    }
}

const NUMEL: u64 = 1000;

/// Saves one tensor whose every element is `value`.
fn save_value(
    dir: &Path,
    tag: &str,
    value: u64,
    retention: Retention,
    fs: &dyn FileSystem,
) -> Result<PathBuf> {
    let (name, shape) = ("w".to_owned(), vec![NUMEL]);
    let kind = Kind::Master;
    let spec = PieceSpec { name, kind, shape, dtype: Dtype::F32, place: 0, part: None, start: 0, len: NUMEL };
    let mut bytes = |_: usize, range: Range<u64>, out: &mut Vec<u8>| {
        range.for_each(|_| out.extend_from_slice(&(value as f32).to_le_bytes()));
        Ok(())
    };
    let contents = Contents {
        origin: Origin { ranks: 1, stage: 0, dtype: Dtype::F32, optimizer: None, kernels: None },
        training: TrainingState { global_steps: value, ..Default::default() },
        client_state: Value::Null,
        config: json!({}),
        aliases: Default::default(),
    };
    let target = Target { dir, tag, update_latest: true, retention, fs };
    save(&World::solo().group(), &target, contents, &[spec], &mut bytes)
}

/// The value of the checkpoint that a load would take, after comparing every checksum; `None` where there is none.
fn found(dir: &Path) -> Option<f32> {
    let checkpoint = Checkpoint::open(&resolve(dir, None).ok()?).unwrap();
    checkpoint.verify().unwrap();
    let mut values = vec![0.0; NUMEL as usize];
    checkpoint.read_f32(checkpoint.weights("w").unwrap(), 0..NUMEL, &mut values).unwrap();
    assert!(values.iter().all(|value| *value == values[0]), "a mixture of two checkpoints");
    Some(values[0])
}

/// Lets the power go after every operation of a save of 2 under `tag`, where 1 was saved as "old" unless `is_first`.
fn at_every_point(tag: &str, is_first: bool, retention: Retention) {
    for until in 0.. {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("runs/checkpoints");
        if !is_first {
            let disk = Watched::new(place.path(), usize::MAX);
            save_value(&dir, "old", 1, Retention::default(), &disk).unwrap();
        }
        let disk = Watched::new(place.path(), until);
        let outcome = save_value(&dir, tag, 2, retention, &disk);
        for survives in [Survives::Synced, Survives::Names] {
            let left = tempfile::tempdir().unwrap();
            disk.remains(survives, left.path());
            let dir = left.path().join("runs/checkpoints");
            let value = found(&dir);
            let what = format!("{tag}, first {is_first}, {survives:?} after operation {until}");
            match (&outcome, is_first) {
                (Ok(_), _) => assert_eq!(value, Some(2.0), "{what}: a save that returned is there"),
                (Err(_), true) => assert!(value.is_none_or(|value| value == 2.0), "{what}"),
                (Err(_), false) => assert!(matches!(value, Some(1.0 | 2.0)), "{what}: {value:?}"),
            }
            let disk = Watched::new(left.path(), usize::MAX);
            save_value(&dir, "next", 3, Retention::default(), &disk).unwrap();
            assert_eq!(found(&dir), Some(3.0), "{what}: the next save works");
        }
        if disk.memory.lock().unwrap().operations < until {
            assert!(outcome.is_ok() && until > 10, "{until} operations");
            return;
        }
    }
}

#[test]
fn a_power_failure_at_any_point_of_a_save_leaves_the_newest_whole_checkpoint() {
    at_every_point("new", false, Retention::default());
    at_every_point("old", false, Retention::default());
    at_every_point("new", false, Retention { keep_last: Some(1), ..Retention::default() });
}

#[test]
fn the_first_checkpoint_outlives_a_power_failure_with_the_folders_made_for_it() {
    at_every_point("first", true, Retention::default());
}
