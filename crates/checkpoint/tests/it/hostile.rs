//! Files made to harm: every one ends in an error, soon and in little memory, and nothing in them ever runs.

use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::pt::pickle::{Limits, read};
use ferrospeed_checkpoint::pt::{
    PtFile, StorageToWrite, StoredTensor, TensorTable, Unknown, Value, write_pt,
};
use ferrospeed_checkpoint::{Checkpoint, Dtype};
use ferrospeed_testkit::golden::golden;
use ferrospeed_testkit::property::{Random, seeds};

fn refused(pickle: &[u8]) -> String {
    match read(pickle, Unknown::Refuse, Limits::default()) {
        Err(why) => why,
        Ok(value) => panic!("{value:?} was accepted"),
    }
}

#[test]
fn forbidden_names_are_refused_and_never_called() {
    for name in [
        "os\nsystem\n",
        "posix\nsystem\n",
        "builtins\neval\n",
        "torch\nload\n",
        "subprocess\nPopen\n",
        "torch._utils\n_import_dotted_name\n",
    ] {
        let pickle = format!("\u{80}\u{2}c{name}X\u{4}\0\0\0true\u{85}R.");
        let pickle: Vec<u8> = pickle.chars().map(|c| u32::from(c) as u8).collect();
        let why = refused(&pickle);
        assert!(why.contains("is not allowed") && why.contains("nothing was executed"), "{why}");
        // Kept on request, as data.
        let kept = read(&pickle, Unknown::Keep, Limits::default()).unwrap();
        assert!(matches!(kept, Value::Object { .. }), "{kept:?}");
    }
}

#[test]
fn operations_that_torch_does_not_use_are_refused() {
    for operation in [
        b"i".as_slice(),
        b"o",
        b"P",
        b"\x82",
        b"\x93",
        b"\x92",
        b"I01\n",
        b"F1\n",
        b"S'a'\n",
        b"p0\n",
        b"g0\n",
        b"2",
        b"0",
        b"1",
        b"\x8b",
    ] {
        let mut pickle = vec![0x80, 2];
        pickle.extend_from_slice(operation);
        pickle.push(b'.');
        let why = refused(&pickle);
        assert!(why.contains("at byte"), "{why}");
    }
}

#[test]
fn malformed_pickles_are_refused() {
    let cases: [&[u8]; 14] = [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02(.",
        b"\x80\x02NN.",
        b"\x80\x02h\x05.",
        b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x02X\x01\0\0\0\xff.",
        b"\x80\x02\x8a\xff.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02Na.",
        b"\x80\x02]K\x01K\x02b.",
        b"\x80\x02(K\x01tQ.",
    ];
    cases.iter().for_each(|pickle| drop(refused(pickle)));
}

#[test]
fn values_that_unfold_without_end_are_refused() {
    // A list of two notes of a list of two notes of …
    let mut pickle = vec![0x80, 2, b'K', 1, b'q', 0];
    for note in 1..60u8 {
        pickle.extend_from_slice(&[b'h', note - 1, 0x86, b'q', note]);
    }
    pickle.push(b'.');
    assert!(refused(&pickle).contains("unfolds"), "doubling");
    // A long text recalled a million times.
    let mut pickle = vec![0x80, 2, b'X', 0, 0, 1, 0];
    pickle.extend(std::iter::repeat_n(b'a', 65536));
    pickle.extend_from_slice(&[b'q', 0, 0x85, b'(']);
    pickle.extend((0..1_000_000).flat_map(|_| [b'h', 0]));
    pickle.extend_from_slice(&[b't', 0x86, b'.']);
    assert!(refused(&pickle).contains("unfolds"), "one text many times");
    // A list that holds itself.
    assert!(refused(b"\x80\x02]q\0h\0a.").contains("deep"), "a loop");
    // Containers in containers.
    let mut pickle = vec![0x80, 2];
    pickle.extend(std::iter::repeat_n(b']', 100_000));
    pickle.extend(std::iter::repeat_n(b'a', 99_999));
    pickle.push(b'.');
    assert!(refused(&pickle).contains("deep"), "depth");
}

#[test]
fn tensors_that_do_not_lie_in_their_storage_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.pt");
    let lies: [(&str, fn(&mut ferrospeed_checkpoint::pt::StoredTensor)); 5] = [
        ("shape", |t| t.shape = vec![5]),
        ("offset", |t| t.offset = 1),
        ("stride", |t| t.stride = vec![2]),
        ("absurd", |t| (t.shape, t.stride) = (vec![1 << 61, 1 << 61], vec![0, 0])),
        ("repeated", |t| (t.shape, t.stride) = (vec![1 << 40], vec![0])),
    ];
    for (what, lie) in lies {
        let mut table = TensorTable::default();
        let Value::Tensor(mut tensor) = table.tensor(Dtype::F32, &[4]) else { unreachable!() };
        lie(&mut tensor);
        write_pt(&path, &Value::Tensor(tensor), &table.storages, &mut |_, range, out| {
            out.resize(out.len() + (range.end - range.start) as usize * 4, 0);
            Ok(())
        })
        .unwrap();
        assert!(PtFile::open(&path).is_err(), "{what}");
    }
    // A storage that says more than its entry holds.
    let mut table = TensorTable::default();
    let Value::Tensor(mut tensor) = table.tensor(Dtype::F32, &[4]) else { unreachable!() };
    tensor.storage_numel = 1 << 40;
    tensor.shape = vec![1 << 40];
    let small = [StorageToWrite { dtype: Dtype::F32, numel: 4 }];
    write_pt(&path, &Value::Tensor(tensor.clone()), &small, &mut |_, range, out| {
        out.resize(out.len() + (range.end - range.start) as usize * 4, 0);
        Ok(())
    })
    .unwrap();
    let error = PtFile::open(&path).unwrap().read(&tensor, 0..1, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("expected"), "{error}");
}

fn sample() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sample.pt");
    let mut table = TensorTable::default();
    let value =
        Value::dict([("w", table.tensor(Dtype::F32, &[8, 4])), ("b", table.tensor(Dtype::BF16, &[8]))]);
    write_pt(&path, &value, &table.storages, &mut |storage, range, out| {
        out.resize(out.len() + (range.end - range.start) as usize * if storage == 0 { 4 } else { 2 }, 1);
        Ok(())
    })
    .unwrap();
    (folder, path)
}

fn patched(path: &Path, find: &[u8], replace: &[u8]) -> Vec<u8> {
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes.windows(find.len()).rposition(|window| window == find).unwrap();
    bytes[at..at + replace.len()].copy_from_slice(replace);
    bytes
}

#[test]
fn zip_tricks_are_refused() {
    let (_folder, path) = sample();
    let good = std::fs::read(&path).unwrap();
    let central = |field: usize, bytes: &[u8]| {
        // The directory's first record.
        let mut changed = good.clone();
        let at = good.windows(4).position(|window| window == b"PK\x01\x02").unwrap();
        changed[at + field..at + field + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let tricks = [
        ("compressed", central(10, &[8, 0])),
        ("encrypted", central(8, &[1, 8])),
        ("longer than stored", central(24, &[255, 255, 255, 0])),
        ("outside", central(42, &[255, 255, 255, 0])),
        (
            "two entries at one place",
            central(42, &good[good.windows(4).rposition(|w| w == b"PK\x01\x02").unwrap() + 42..][..4]),
        ),
        ("traversal", patched(&path, b"sample/data/0", b"../../etc/x/0")),
        ("count", patched(&path, b"PK\x05\x06\0\0\0\0", &[b'P', b'K', 5, 6, 0, 0, 0, 0, 255, 200, 255, 200])),
        ("no end", good[..good.len() - 1].to_vec()),
        ("empty", Vec::new()),
        ("a flipped bit", {
            let mut b = good.clone();
            b[good.windows(6).position(|w| w == b"torch\n").unwrap()] ^= 1;
            b
        }),
    ];
    for (what, bytes) in tricks {
        std::fs::write(&path, bytes).unwrap();
        let outcome = PtFile::open(&path).map(|file| file.value().kind());
        assert!(outcome.is_err(), "{what} was accepted");
    }
}

#[test]
fn damaged_zips_of_torch_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut samples: Vec<Vec<u8>> = golden()
        .entries("checkpoint/pt_samples", ".pt")
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect();
    samples.push(std::fs::read(sample().1).unwrap());
    let path = folder.path().join("fuzz.pt");
    for seed in seeds(600) {
        let mut bytes = samples[seed as usize % samples.len()].clone();
        Random(seed).damage(&mut bytes);
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(file) = PtFile::open_with(&path, Unknown::Keep) {
            visit(&file, file.value());
        }
    }
}

#[test]
fn damaged_pickles_are_read_or_refused() {
    let mut pickle = b"\x80\x02}(X\x01\0\0\0a]q\0(K\x01J\xff\xff\xff\xffe.".to_vec();
    pickle.extend_from_slice(b"ccollections\nOrderedDict\n)RctorchSize\n(K\x02K\x03t\x85R\x86u.");
    for seed in seeds(20_000) {
        let mut bytes = pickle.clone();
        Random(seed).damage(&mut bytes);
        // Either way: it returned.
        let _ = read(&bytes, Unknown::Keep, Limits { values: 10_000, depth: 50 });
    }
}

#[test]
fn damaged_manifests_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("manifest.json");
    let good = br#"{"format":"ferrospeed-checkpoint","version":1,"written_by":"x","tag":"t","unix_time_s":1,"origin":{"ranks":1,"stage":0,"dtype":"F32","optimizer":null},"training":{"global_steps":1,"global_samples":1,"skipped_steps":0,"skipped_in_a_row":0,"micro_steps":1,"optimizer_steps":1,"last_grad_norm":null,"seed":1,"data_position":0,"groups":[],"scheduler":null,"loss_scaler":null},"client_state":null,"config":{},"files":[{"name":"a","bytes":80,"crc32":1}],"tensors":[{"name":"w","kind":"master","shape":[2,5],"dtype":"F32","pieces":[{"file":0,"offset":8,"start":0,"len":10,"crc32":[7]}]}]}"#;
    std::fs::write(folder.path().join("a"), [0; 80]).unwrap();
    for seed in seeds(2_000) {
        let mut bytes = good.to_vec();
        Random(seed).damage(&mut bytes);
        std::fs::write(&manifest, &bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
            let _ = checkpoint.verify();
        }
    }
}

fn visit(file: &PtFile, value: &Value) {
    match value {
        Value::Tensor(tensor) if tensor.numel() < 10_000 => drop(file.read_all(tensor)),
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            items.iter().for_each(|item| visit(file, item))
        }
        Value::Dict(pairs) | Value::OrderedDict(pairs) => {
            pairs.iter().for_each(|(_, value)| visit(file, value))
        }
        _ => {}
    }
}

/// A counter that cannot be read is not taken for nothing: an optimizer would begin anew without a word.
#[test]
fn a_number_of_steps_is_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.pt");
    let read = |dtype: Dtype, bytes: &[u8], damage: bool| {
        let tensor = StoredTensor {
            dtype,
            shape: vec![],
            stride: vec![],
            offset: 0,
            storage: "0".into(),
            storage_numel: 1,
            requires_grad: false,
            is_parameter: false,
        };
        let storages = [StorageToWrite { dtype, numel: 1 }];
        write_pt(&path, &Value::Tensor(tensor.clone()), &storages, &mut |_, _, out| {
            out.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        if damage {
            let at = PtFile::open(&path).unwrap().start_of(&tensor).unwrap() as usize;
            let mut file = std::fs::read(&path).unwrap();
            file[at] ^= 16;
            std::fs::write(&path, file).unwrap();
        }
        let file = PtFile::open(&path).unwrap();
        file.read_count(file.value()).map_err(|error| error.to_string())
    };
    assert_eq!(read(Dtype::F32, &24f32.to_le_bytes(), false), Ok(24));
    assert_eq!(read(Dtype::I64, &24i64.to_le_bytes(), false), Ok(24));
    for (dtype, bytes, damage, why) in [
        (Dtype::F32, &24f32.to_le_bytes()[..], true, "checksum"),
        (Dtype::I64, &24i64.to_le_bytes()[..], true, "checksum"),
        (Dtype::F32, &2.5f32.to_le_bytes()[..], false, "no number of steps"),
        (Dtype::F32, &f32::NAN.to_le_bytes()[..], false, "no number of steps"),
        (Dtype::I64, &(-1i64).to_le_bytes()[..], false, "no number of steps"),
    ] {
        let said = read(dtype, bytes, damage).unwrap_err();
        assert!(said.contains(why), "{dtype:?} {bytes:?}: {said}");
    }
}
