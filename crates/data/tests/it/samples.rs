//! Samples: every kind in every kind of file, and what is wrong with them.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use ferrospeed_data::{
    Codec, Rendering, SampleFiles, SampleKind, Sequences, Source, Split, TokenStream, TooLong, unheard,
};
use ferrospeed_text::{ChatTemplate, TrainOn};

const LENGTH: u64 = 64;

fn files(paths: Vec<PathBuf>) -> SampleFiles {
    let template = Some(ChatTemplate::of_name("plain", None).unwrap());
    let rendering = Arc::new(Rendering { template, train_on: TrainOn::Assistant });
    SampleFiles { paths, kind: None, rendering, length: LENGTH, too_long: TooLong::Drop }
}

fn open(files: SampleFiles) -> Result<Arc<dyn TokenStream>, String> {
    let cache = tempfile::tempdir().unwrap();
    let opened = Source::Samples(files).open(&Codec::Bytes, cache.path(), &mut unheard);
    opened.map_err(|error| error.to_string())
}

/// All text, and the part of it that is learnt.
fn texts(stream: &dyn TokenStream) -> (String, String) {
    let count = stream.len() as usize;
    let mut tokens = vec![0; count];
    stream.read(0, &mut tokens).unwrap();
    let trained = stream.trained(0, count).unwrap().unwrap();
    let learnt: Vec<i64> =
        tokens.iter().zip(trained).filter(|(_, trained)| *trained).map(|(t, _)| *t).collect();
    (Codec::Bytes.decode(&tokens).unwrap(), Codec::Bytes.decode(&learnt).unwrap())
}

const MESSAGES: &str =
    r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}"#;

#[test]
fn every_kind_is_told_by_its_first_record() {
    let turns = r#"{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "system": "S"}"#;
    let alpaca = r#"{"instruction": "Hi", "input": "you", "output": "Ho"}"#;
    let lists = r#"{"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Ho"}]}"#;
    for (line, kind, text, learnt) in [
        (MESSAGES, SampleKind::Messages, "user: Hi\nassistant: Ho\n", " Ho\n"),
        (turns, SampleKind::ShareGpt, "system: S\nuser: Hi\nassistant: Ho\n", " Ho\n"),
        (alpaca, SampleKind::Alpaca, "user: Hi\n\nyou\nassistant: Ho\n", " Ho\n"),
        (r#"{"prompt": "1+1=", "completion": "2"}"#, SampleKind::Completion, "1+1=2\n", "2\n"),
        (lists, SampleKind::Completion, "user: Hi\nassistant: Ho\n", " Ho\n"),
        (r#"{"text": "all of it"}"#, SampleKind::Text, "all of it\n", "all of it\n"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        std::fs::write(&path, format!("{line}\n")).unwrap();
        let files = files(vec![path]);
        assert_eq!(files.kind().unwrap(), kind);
        let (whole, trained) = texts(&*open(files).unwrap());
        assert_eq!((whole.trim_end_matches('\0'), trained.as_str()), (text, learnt), "{line}");
        assert_eq!(whole.len() as u64, LENGTH, "a sequence is filled");
        assert_eq!(SampleKind::of_name(kind.name()), Some(kind));
    }
}

#[test]
fn lines_arrays_and_compressed_files_are_read_by_folder_and_by_pattern() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let line = |text: &str| format!("{}\n", MESSAGES.replace("Ho", text));
    std::fs::write(path("a.jsonl"), "\u{feff}\n".to_owned() + &line("lines")).unwrap();
    std::fs::write(path("b.json"), format!(" [{}, {}]", line("one"), line("two"))).unwrap();
    let gz = std::fs::File::create(path("c.jsonl.gz")).unwrap();
    let mut gz = flate2::write::GzEncoder::new(gz, flate2::Compression::fast());
    gz.write_all(line("packed").as_bytes()).unwrap();
    gz.finish().unwrap();
    std::fs::write(path("d.json.zst"), zstd::encode_all(format!("[{}]", line("zst")).as_bytes(), 1).unwrap())
        .unwrap();
    std::fs::write(path("notes.txt"), "no sample").unwrap();
    for paths in [vec![folder.path().to_path_buf()], vec![path("*.json*")]] {
        let stream = open(files(paths)).unwrap();
        let (whole, _) = texts(&*stream);
        for text in ["lines", "one", "two", "packed", "zst"] {
            assert!(whole.contains(&format!("assistant: {text}\n")), "{whole:?}");
        }
        assert_eq!(stream.counted().unwrap().samples, 5);
    }
    // Two arrays, one behind the other, as files that were joined have them.
    std::fs::write(path("b.json"), format!("[{}]\n[{}]", line("one"), line("two"))).unwrap();
    let error = open(files(vec![path("b.json")])).err().unwrap();
    assert!(error.contains("b.json: line 3, column 1: is no JSON: trailing characters"), "{error}");
    let error = open(files(vec![path("*.nothing")])).err().unwrap();
    assert!(error.contains("stands for no file"), "{error}");
}

#[test]
fn what_is_wrong_is_said_with_its_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let image = r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#;
    for (line, expected) in [
        (
            r#"{"instruction": "x", "output": "y"}"#,
            "line 2: is not of the kind 'messages', as the first sample is: it has instruction, output (alpaca)",
        ),
        ("{", "line 2: is no JSON object: EOF"),
        (r#"{"messages": []}"#, "line 2: has no message"),
        (image, "line 2: message 1: has a part of type 'image_url'"),
        (r#"{"messages": [{"role": "user", "content": "x"}]}"#, "line 2: has no message of the assistant"),
    ] {
        std::fs::write(&path, format!("{MESSAGES}\n{line}\n")).unwrap();
        let error = open(files(vec![path.clone()])).err().unwrap();
        assert!(error.contains("a.jsonl: ") && error.contains(expected), "{error}");
    }
    std::fs::write(&path, r#"{"question": "x"}"#).unwrap();
    let error = open(files(vec![path.clone()])).err().unwrap();
    assert!(
        error.contains("line 1: is no sample that is known: it has question") && error.contains("(alpaca)"),
        "{error}"
    );
    std::fs::write(&path, MESSAGES).unwrap();
    let mut untold = files(vec![path]);
    untold.rendering = Arc::new(Rendering { template: None, train_on: TrainOn::Assistant });
    let error = open(untold).err().unwrap();
    assert!(error.contains("brings no chat template; name one with data.chat_template"), "{error}");
}

#[test]
fn masks_are_read_from_the_cache_again_and_sequences_know_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    std::fs::write(&path, format!("{MESSAGES}\n").repeat(5)).unwrap();
    let source = Source::Samples(files(vec![path]));
    let cache = folder.path().join("cache");
    let open = || source.open(&Codec::Bytes, &cache, &mut unheard).unwrap();
    let first = texts(&*open());
    assert_eq!(texts(&*open()), first);
    // A cache whose mask is not what was written is made anew.
    let mask = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
    let mask = mask.into_iter().find(|path| path.extension().is_some_and(|e| e == "mask")).unwrap();
    std::fs::write(&mask, vec![1; std::fs::metadata(&mask).unwrap().len() as usize]).unwrap();
    assert_eq!(texts(&*open()), first);
    let sequences = Sequences::split(open(), LENGTH, 0.0).unwrap().by_documents(None).unwrap();
    // Two samples of 23 bytes, and what fills the rest: none is cut.
    assert_eq!(sequences.documents(Split::Train, 0, &[0; 64]).unwrap().unwrap(), [0, 23, 46, 64]);
    let trained = sequences.trained(Split::Train, 0, 64).unwrap().unwrap();
    assert_eq!(trained.iter().filter(|&&trained| trained).count(), 2 * " Ho\n".len());
    let counted = sequences.counted()[0];
    assert_eq!((counted.samples, counted.tokens, counted.trained), (5, 115, 20));
}
