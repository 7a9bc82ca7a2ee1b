//! Every format, read from files that other programs wrote (`golden/make.py`), and what damaged ones are refused with.

use ferrospeed_testkit::child;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use ferrospeed_data::{Codec, DataError, Preparing, Source, TokenStream, TokenType, unheard};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(golden("expected.json")).unwrap()).unwrap()
}

fn open(source: &Source, codec: &Codec) -> Result<Vec<i64>, DataError> {
    let cache = tempfile::tempdir().unwrap();
    source.open(codec, cache.path(), &mut unheard).map(|stream| all(&*stream))
}

fn all(stream: &dyn TokenStream) -> Vec<i64> {
    let mut tokens = vec![0; stream.len() as usize];
    stream.read(0, &mut tokens).unwrap();
    tokens
}

/// The texts as bytes, a newline after each; empty ones leave nothing.
fn expected_bytes() -> Vec<i64> {
    let expected = expected();
    let texts = expected["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    texts
        .filter(|text| !text.is_empty())
        .flat_map(|text| [text, "\n"].concat().into_bytes())
        .map(i64::from)
        .collect()
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

fn parquet(path: PathBuf) -> Source {
    Source::Parquet { paths: vec![path], column: "text".into() }
}

fn json_lines(path: PathBuf) -> Source {
    Source::JsonLines { paths: vec![path], field: "text".into() }
}

#[test]
fn json_lines_read_back_exactly() {
    assert_eq!(open(&json_lines(golden("texts.jsonl")), &Codec::Bytes).unwrap(), expected_bytes());
}

#[test]
fn texts_know_where_their_documents_begin() {
    let texts = expected();
    let texts = texts["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap().len() as u64);
    let mut ends: Vec<u64> = Vec::new();
    for length in texts.filter(|&length| length > 0) {
        ends.push(ends.last().unwrap_or(&0) + length + 1);
    }
    for source in [json_lines(golden("texts.jsonl")), parquet(golden("texts-snappy.parquet"))] {
        let cache = tempfile::tempdir().unwrap();
        // Made, and found again.
        for _ in 0..2 {
            let stream = source.open(&Codec::Bytes, cache.path(), &mut unheard).unwrap();
            let inner = &ends[..ends.len() - 1];
            assert_eq!(stream.beginnings(0, stream.len()).unwrap().unwrap(), inner);
            let behind: Vec<u64> = inner.iter().copied().filter(|&end| end > ends[0]).collect();
            assert_eq!(stream.beginnings(ends[0], stream.len()).unwrap().unwrap(), behind);
        }
        // A cache that has lost them is made anew.
        for file in std::fs::read_dir(cache.path()).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "ends") {
                std::fs::write(path, b"cut off").unwrap();
            }
        }
        let stream = source.open(&Codec::Bytes, cache.path(), &mut unheard).unwrap();
        assert_eq!(stream.beginnings(0, stream.len()).unwrap().unwrap().len(), ends.len() - 1);
        // And so is one of which a bit has turned over.
        let tokens = all(&*stream);
        for extension in ["bin", "ends"] {
            let mut files = std::fs::read_dir(cache.path()).unwrap().map(|file| file.unwrap().path());
            let path = files.find(|path| path.extension().is_some_and(|found| found == extension)).unwrap();
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[0] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            let stream = source.open(&Codec::Bytes, cache.path(), &mut unheard).unwrap();
            assert_eq!(all(&*stream), tokens);
            assert_eq!(stream.beginnings(0, stream.len()).unwrap().unwrap(), ends[..ends.len() - 1]);
        }
    }
}

#[test]
fn parquet_reads_back_exactly_in_every_codec_and_encoding() {
    for codec in ["snappy", "gzip", "lz4", "brotli", "zstd", "none"] {
        let source = parquet(golden(&format!("texts-{codec}.parquet")));
        assert_eq!(open(&source, &Codec::Bytes).unwrap(), expected_bytes(), "{codec}");
    }
}

#[test]
fn a_tokenizer_gives_the_ids_that_its_own_library_gives() {
    let codec = Codec::from_file(&golden("tokenizer.json")).unwrap();
    let wanted = numbers(&expected()["tokens"]);
    for source in [json_lines(golden("texts.jsonl")), parquet(golden("texts-snappy.parquet"))] {
        assert_eq!(open(&source, &codec).unwrap(), wanted);
    }
    assert_eq!(codec.vocabulary(), 320);
    let text = expected()["texts"][2].as_str().unwrap().to_owned();
    let ids: Vec<i64> = codec.encode(&text).unwrap().into_iter().map(i64::from).collect();
    assert_eq!(codec.decode(&ids).unwrap(), text);
}

#[test]
fn nano_gpt_files_read_back_exactly() {
    let tokens =
        |kind, name: &str| open(&Source::Tokens { paths: vec![golden(name)], kind }, &Codec::Bytes).unwrap();
    let wanted = numbers(&expected()["tokens"]);
    assert_eq!(tokens(TokenType::U16, "tokens-u16.bin"), wanted);
    let shifted: Vec<i64> = wanted.iter().map(|token| token + 70_000).collect();
    assert_eq!(tokens(TokenType::U32, "tokens-u32.bin"), shifted);
}

#[test]
fn megatron_files_read_back_exactly_by_prefix_or_either_file() {
    let wanted = numbers(&expected()["megatron"]);
    for name in ["megatron-u16", "megatron-u16.bin", "megatron-u16.idx", "megatron-i32"] {
        assert_eq!(
            open(&Source::Megatron { prefixes: vec![golden(name)] }, &Codec::Bytes).unwrap(),
            wanted,
            "{name}"
        );
    }
    // Any stretch, across the places where the file jumps.
    let stream = Source::Megatron { prefixes: vec![golden("megatron-i32"), golden("megatron-u16")] }
        .open(&Codec::Bytes, Path::new("unused"), &mut unheard)
        .unwrap();
    let twice = [wanted.clone(), wanted].concat();
    for start in (0..twice.len()).step_by(13) {
        let mut some = vec![0; 29.min(twice.len() - start)];
        stream.read(start as u64, &mut some).unwrap();
        assert_eq!(some, twice[start..start + some.len()]);
    }
}

#[test]
fn text_files_join_in_order_with_a_newline_between() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("b.md", "second"),
        ("a.rs", "first"),
        ("c.txt", "not this"),
        (".hidden.rs", "nor this"),
        ("d.rs", ""),
    ] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let source =
        Source::Text { paths: vec![folder.path().into()], extensions: vec!["rs".into(), "md".into()] };
    let bytes: Vec<u8> = open(&source, &Codec::Bytes).unwrap().into_iter().map(|byte| byte as u8).collect();
    assert_eq!(bytes, b"first\nsecond\n");
}

#[test]
fn text_becomes_tokens_once_and_again_when_it_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cache) = (folder.path().join("text"), folder.path().join("cache"));
    std::fs::write(&file, "one").unwrap();
    let source = Source::Text { paths: vec![file.clone()], extensions: vec![] };
    let read = || {
        let mut made = 0;
        let stream = source
            .open(&Codec::Bytes, &cache, &mut |now| {
                made += 1;
                unheard(now)
            })
            .unwrap();
        (made > 0, all(&*stream).len())
    };
    assert_eq!(read(), (true, 4));
    assert_eq!(read(), (false, 4));
    std::fs::write(&file, "three").unwrap();
    assert_eq!(read(), (true, 6));
    // As an editor, or an archive, may leave it.
    let time = std::fs::metadata(&file).unwrap().modified().unwrap();
    std::fs::write(&file, "THREE").unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
    assert_eq!(read(), (true, 6));
    assert_eq!(read(), (false, 6));
    // A token file that was cut off, or never got its manifest, is made anew.
    for entry in std::fs::read_dir(&cache).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "bin") {
            std::fs::write(path, "x").unwrap();
        }
    }
    assert_eq!(read(), (true, 6));
}

/// Whoever goes on to write behind the place where a file was cut leaves a hole, which reads as zeros.
#[test]
fn what_is_cut_or_changed_while_it_becomes_tokens_is_never_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cache) = (folder.path().join("text"), folder.path().join("cache"));
    let text: Vec<u8> = (0..12 << 20).map(|at: u32| b'a' + (at / 7 % 26) as u8).collect();
    std::fs::write(&file, &text).unwrap();
    let source = Source::Text { paths: vec![file.clone()], extensions: vec![] };
    let found = |part: &str| {
        let entries = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.to_str().unwrap().contains(part)).collect::<Vec<_>>()
    };
    let set_len = |path: &Path, len: u64| {
        std::fs::File::options().write(true).open(path).unwrap().set_len(len).unwrap();
    };
    let refused = |change: &dyn Fn()| {
        let mut told = 0;
        let made = source.open(&Codec::Bytes, &cache, &mut |now| {
            told += 1;
            if told == 2 {
                change();
            }
            unheard(now)
        });
        assert!(found(".partial").is_empty() && found(".json").is_empty(), "nothing of it stays");
        made.err().expect("no whole cache").to_string()
    };
    for part in [".bin.partial", ".ends.partial"] {
        let said = refused(&|| set_len(&found(part)[0], 10));
        assert!(said.contains("is not what was written to it"), "{part}: {said}");
    }
    let said = refused(&|| set_len(&file, text.len() as u64 - 1));
    assert!(said.contains("text: was changed while it became tokens"), "{said}");
    std::fs::write(&file, &text).unwrap();
    let stream = source.open(&Codec::Bytes, &cache, &mut unheard).unwrap();
    assert!(all(&*stream).iter().zip(&text).all(|(token, byte)| *token == i64::from(*byte)));
}

#[test]
fn what_a_killed_builder_left_goes_with_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cache) = (folder.path().join("text"), folder.path().join("cache"));
    std::fs::write(&file, "some text").unwrap();
    let source = Source::Text { paths: vec![file], extensions: Vec::new() };
    let made = || {
        source.open(&Codec::Bytes, &cache, &mut unheard).unwrap();
        let names = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    let names = made();
    let tokens = names.iter().find(|name| name.ends_with(".bin")).unwrap();
    std::fs::remove_file(cache.join(tokens)).unwrap();
    // No process can have the number. What is left of other tokens goes too.
    for left in [format!(".{tokens}.partial-4194999-1f"), ".tokens-1.ends.partial-4194999-2f".into()] {
        std::fs::write(cache.join(left), "half").unwrap();
    }
    assert_eq!(made(), names);
    // Who is still there is still writing.
    std::fs::remove_file(cache.join(tokens)).unwrap();
    let alive = format!(".{tokens}.partial-{}-1f", std::process::id());
    std::fs::write(cache.join(&alive), "half").unwrap();
    assert!(made().contains(&alive));
}

#[test]
fn no_cache_is_written_through_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cache) = (folder.path().join("text"), folder.path().join("cache"));
    std::fs::write(&file, "some text").unwrap();
    let source = Source::Text { paths: vec![file], extensions: Vec::new() };
    let make = || source.open(&Codec::Bytes, &cache, &mut unheard);
    make().unwrap();
    let mine = folder.path().join("mine");
    std::fs::write(&mine, "mine").unwrap();
    let names: Vec<_> = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    let process = std::process::id();
    for name in names.iter().filter(|name| name.extension().is_some_and(|ending| ending != "lock")) {
        // Where it will lie, and where it could be guessed that it is made.
        std::fs::remove_file(name).unwrap();
        let guessed = ["partial", "ends.partial"].map(|end| name.with_extension(format!("{process}.{end}")));
        for place in guessed.iter().chain([name]) {
            let _ = std::os::unix::fs::symlink(&mine, place);
        }
    }
    assert_eq!(make().unwrap().len(), 10);
    assert_eq!(std::fs::read_to_string(&mine).unwrap(), "mine");
    let lock = names.iter().find(|name| name.extension().is_some_and(|ending| ending == "lock")).unwrap();
    std::fs::remove_file(lock).unwrap();
    std::os::unix::fs::symlink(&mine, lock).unwrap();
    std::fs::remove_file(lock.with_extension("json")).unwrap();
    let refused = make().err().unwrap().to_string();
    assert!(refused.contains("is a link, and a lock must be a file"), "{refused}");
}

#[test]
fn who_is_told_to_stop_leaves_nothing_half_done() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cache) = (folder.path().join("text"), folder.path().join("cache"));
    std::fs::write(&file, "some text").unwrap();
    let source = Source::Text { paths: vec![file], extensions: vec![] };
    let stop = || source.open(&Codec::Bytes, &cache, &mut |_| ControlFlow::Break(())).err().unwrap();
    assert!(matches!(stop(), DataError::Stopped));
    let names = || std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let [lock] = &names()[..] else { panic!("{:?}", names()) };
    // Nor does it wait for another who makes the same tokens.
    let held = std::fs::File::open(lock).unwrap();
    held.lock().unwrap();
    assert!(matches!(stop(), DataError::Stopped));
}

#[test]
fn who_listens_is_asked_while_a_batch_becomes_tokens_and_while_files_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cache) = (folder.path().join("text"), folder.path().join("cache"));
    std::fs::write(&file, "some text\n".repeat(1000)).unwrap();
    let source = Source::Text { paths: vec![file], extensions: vec![] };
    let codec = Codec::from_file(&golden("tokenizer.json")).unwrap();
    // All is read, and nothing is written yet: the only batch becomes tokens.
    let at_work = |now: Preparing| now.bytes > 0 && now.tokens == 0;
    let asked = std::cell::Cell::new(0);
    let mut tell = |now: Preparing| {
        asked.set(asked.get() + usize::from(now.tokens > 0));
        if asked.get() == 2 || at_work(now) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let stopped = source.open(&codec, &cache, &mut tell).err().unwrap();
    assert!(matches!(stopped, DataError::Stopped) && asked.get() == 0, "{stopped} {asked:?}");
    // Of bytes there is nothing to wait for; what was written is read once more.
    let stopped = source.open(&Codec::Bytes, &cache, &mut tell).err().unwrap();
    assert!(matches!(stopped, DataError::Stopped) && asked.get() == 2, "{stopped} {asked:?}");
    let left = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
    let left: Vec<_> = left.filter(|path| path.extension().is_none_or(|ending| ending != "lock")).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(source.open(&codec, &cache, &mut unheard).unwrap().len() > 1000);
}

#[test]
fn ranks_that_start_together_make_one_token_file() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cache) = (folder.path().join("text"), folder.path().join("cache"));
    std::fs::write(&file, "some text\n".repeat(200_000)).unwrap();
    let source = Source::Text { paths: vec![file], extensions: vec![] };
    let made = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut maker = false;
                // Who waits is told that nothing is done yet.
                let mut tell = |now: Preparing| {
                    maker |= now.tokens > 0;
                    unheard(now)
                };
                let stream = source.open(&Codec::Bytes, &cache, &mut tell).unwrap();
                assert_eq!(stream.len(), 2_000_001);
                made.fetch_add(usize::from(maker), std::sync::atomic::Ordering::Relaxed);
            });
        }
    });
    assert_eq!(made.into_inner(), 1);
}

fn refusal(source: &Source, codec: &Codec) -> String {
    open(source, codec).err().unwrap_or_else(|| panic!("{source:?} was accepted")).to_string()
}

#[test]
fn a_tokenizer_whose_decoder_is_damaged_is_refused() {
    for damage in ["1e400", "\"\\ud800\"", &("[".repeat(200) + &"]".repeat(200))] {
        let text = format!("{{\"version\": \"1.0\", \"decoder\": {{\"x\": {damage}}}}}");
        let said = Codec::from_bytes("tokenizer.json".as_ref(), text.as_bytes(), &Value::Null).unwrap_err();
        assert!(said.to_string().contains("tokenizer.json: is no tokenizer: "), "{said}");
    }
}

#[test]
fn empty_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("empty");
    std::fs::write(&file, "").unwrap();
    let paths = vec![file.clone()];
    for source in [
        Source::Text { paths: paths.clone(), extensions: vec![] },
        json_lines(file.clone()),
        parquet(file.clone()),
        Source::Tokens { paths, kind: TokenType::U16 },
    ] {
        let message = refusal(&source, &Codec::Bytes);
        assert!(message.contains("empty: is empty"), "{message}");
    }
    std::fs::write(folder.path().join("empty.idx"), "").unwrap();
    let message = refusal(&Source::Megatron { prefixes: vec![file] }, &Codec::Bytes);
    assert!(message.contains("empty.idx: byte 0: is no Megatron index"), "{message}");
}

#[test]
fn a_missing_column_is_refused_with_those_there_are() {
    let path = golden("texts-snappy.parquet");
    let source = Source::Parquet { paths: vec![path.clone()], column: "body".into() };
    let message = refusal(&source, &Codec::Bytes);
    assert!(
        message.contains("has no column 'body', but id, text, tags.list.element; set data.column"),
        "{message}"
    );
    for (column, holds) in [("id", "INT64"), ("tags.list.element", "lists")] {
        let message =
            refusal(&Source::Parquet { paths: vec![path.clone()], column: column.into() }, &Codec::Bytes);
        assert!(message.contains(&format!("column '{column}' holds {holds}, not texts")), "{message}");
    }
}

#[test]
fn a_cut_off_parquet_file_is_refused_at_any_length() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(golden("texts-gzip.parquet")).unwrap();
    let file = folder.path().join("cut.parquet");
    for length in (1..whole.len()).step_by(97) {
        std::fs::write(&file, &whole[..length]).unwrap();
        let message = refusal(&parquet(file.clone()), &Codec::Bytes);
        assert!(
            message.contains(&format!("cut.parquet: footer (byte {length}): is damaged or cut off")),
            "{message}"
        );
    }
}

#[test]
fn a_damaged_parquet_file_is_an_error_or_other_text_and_never_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("damaged.parquet");
    for codec in ["snappy", "gzip", "lz4", "zstd", "none"] {
        let whole = std::fs::read(golden(&format!("texts-{codec}.parquet"))).unwrap();
        for place in (4..whole.len()).step_by(61) {
            let mut damaged = whole.clone();
            damaged[place] ^= 0xff;
            std::fs::write(&file, &damaged).unwrap();
            if let Err(error) = open(&parquet(file.clone()), &Codec::Bytes) {
                assert!(error.to_string().contains("damaged.parquet: "), "{error}");
            }
        }
    }
}

/// Reads damaged files in a process of its own, and nothing else.
#[test]
fn damaged_parquet_files_for_the_quiet_test() {
    if std::env::var_os("FERROSPEED_TEST_DAMAGED").is_some() {
        a_damaged_parquet_file_is_an_error_or_other_text_and_never_a_panic();
    }
}

#[test]
fn a_damaged_parquet_file_leaves_nothing_on_the_terminal() {
    let output = child::alone(module_path!(), "damaged_parquet_files_for_the_quiet_test")
        .env("FERROSPEED_TEST_DAMAGED", "1")
        .output()
        .unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{error}");
    assert_eq!(error, "");
}

#[test]
fn a_cut_off_or_damaged_megatron_index_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("data");
    let index = std::fs::read(golden("megatron-u16.idx")).unwrap();
    let tokens = std::fs::read(golden("megatron-u16.bin")).unwrap();
    let refused = |index: &[u8], tokens: &[u8]| {
        std::fs::write(prefix.with_extension("idx"), index).unwrap();
        std::fs::write(prefix.with_extension("bin"), tokens).unwrap();
        refusal(&Source::Megatron { prefixes: vec![prefix.clone()] }, &Codec::Bytes)
    };
    for length in (9..index.len()).step_by(31) {
        let message = refused(&index[..length], &tokens);
        assert!(message.contains(&format!("data.idx: byte {length}: ends ")), "{message}");
    }
    let message = refused(&index, &tokens[..100]);
    assert!(
        message.contains("data.bin: has 100 bytes, but its index places tokens 0..174 at byte 0"),
        "{message}"
    );
    let changed = |place: usize, bytes: &[u8]| {
        let mut index = index.clone();
        index[place..place + bytes.len()].copy_from_slice(bytes);
        index
    };
    for (index, expected) in [
        (changed(0, b"TNTIDX"), "before 2021"),
        (changed(0, b"PNG"), "is no Megatron index"),
        (changed(9, &[2]), "byte 9: is of version 2"),
        (changed(17, &[6]), "byte 17: names token type 6"),
        (changed(18, &[0xff; 8]), "it was cut off; copy it anew"),
        (changed(34 + 8, &(-1i32).to_le_bytes()), "byte 42: sequence 2 has a length of -1"),
        (changed(34 + 240 + 16, &(-9i64).to_le_bytes()), "byte 290: sequence 2 starts at byte -9"),
        (changed(34 + 240 + 16, &i64::MAX.to_le_bytes()), "it was cut off, or the index is another"),
    ] {
        let message = refused(&index, &tokens);
        assert!(message.contains(expected), "'{expected}' is not in: {message}");
    }
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused_by_name() {
    let message = Codec::from_file(&golden("texts.jsonl")).unwrap_err().to_string();
    assert!(message.contains("texts.jsonl: is no tokenizer"), "{message}");
}
