//! Samples: every kind in every kind of file, and what is wrong with them.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use ferrospeed_data::{
    Codec, Layout, Mark, Rendering, SampleFiles, SampleKind, Sequences, Source, Split, TokenStream, TooLong,
    unheard,
};
use ferrospeed_text::{ChatTemplate, TrainOn};

const LENGTH: u64 = 64;

fn files(paths: Vec<PathBuf>) -> SampleFiles {
    let template = Some(ChatTemplate::of_name("plain", None).unwrap());
    let rendering = Arc::new(Rendering { template, train_on: TrainOn::Assistant });
    let (kind, too_long, layout) = (None, TooLong::Drop, Layout::Packed);
    SampleFiles { paths, kind, rendering, length: LENGTH, too_long, layout }
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
    let marks = stream.marks(0, count).unwrap().unwrap();
    let learnt: Vec<i64> =
        tokens.iter().zip(marks).filter(|(_, mark)| *mark != Mark::Shown as u8).map(|(t, _)| *t).collect();
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

/// The rows of a file of pairs or verdicts, each as the texts of its documents and what their learnt tokens are.
fn rows(text: &str, layout: Layout) -> Result<Vec<Vec<(String, Vec<u8>)>>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    std::fs::write(&path, text).unwrap();
    let stream = open(SampleFiles { length: 2 * LENGTH, layout, ..files(vec![path]) })?;
    let sequences = Sequences::split(stream, 2 * LENGTH, 0.0).unwrap().by_documents(None).unwrap();
    let row = |index: u64| {
        let mut tokens = vec![0; 2 * LENGTH as usize];
        sequences.read(Split::Train, index, &mut tokens).unwrap();
        let marks = sequences.marks(Split::Train, index, tokens.len()).unwrap().unwrap();
        let borders = sequences.documents(Split::Train, index, &tokens).unwrap().unwrap();
        let document = |ends: &[usize]| {
            let of = ends[0]..ends[1];
            let mut own = marks[of.clone()].to_vec();
            own.dedup();
            (Codec::Bytes.decode(&tokens[of]).unwrap(), own)
        };
        borders.windows(2).take(2).map(document).collect()
    };
    Ok((0..sequences.count(Split::Train)).map(row).collect())
}

#[test]
fn pairs_of_every_form_lie_in_a_row_with_what_is_learnt_of_each() {
    let messages = |text: &str, role: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
    let [q, a, b] = [messages("Q", "user"), messages("A", "assistant"), messages("B", "assistant")];
    let talks = [
        format!(r#"{{"prompt": [{q}], "chosen": [{a}], "rejected": [{b}]}}"#),
        format!(r#"{{"prompt": "Q", "chosen": [{a}], "rejected": [{b}]}}"#),
        format!(r#"{{"prompt": "Q", "chosen": [{q}, {a}], "rejected": [{q}, {b}]}}"#),
        format!(r#"{{"chosen": [{q}, {a}], "rejected": [{q}, {b}]}}"#),
    ];
    let expected = |text: &str, mark: Mark| (text.to_owned(), vec![Mark::Shown as u8, mark as u8]);
    for talk in talks {
        let found = rows(&talk, Layout::Pairs).unwrap();
        let [chosen, rejected] = ["user: Q\nassistant: A\n", "user: Q\nassistant: B\n"];
        assert_eq!(found, [[expected(chosen, Mark::Learnt), expected(rejected, Mark::Rejected)]], "{talk}");
    }
    let texts = [
        r#"{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}"#,
        r#"{"chosen": "1 + 1 = 2", "rejected": "1 + 1 = 3"}"#,
    ];
    for text in texts {
        let found = rows(text, Layout::Pairs).unwrap();
        let [chosen, rejected] = ["1 + 1 = 2\n", "1 + 1 = 3\n"];
        assert_eq!(found, [[expected(chosen, Mark::Learnt), expected(rejected, Mark::Rejected)]], "{text}");
    }
}

#[test]
fn an_answer_with_a_verdict_lies_beside_what_another_prompt_was_answered() {
    let lines = [
        r#"{"prompt": "a:", "completion": "1", "label": true}"#,
        r#"{"prompt": "b:", "completion": "2", "label": false}"#,
        r#"{"prompt": "c:", "completion": "3", "label": true}"#,
    ];
    let found = rows(&lines.join("\n"), Layout::Judged).unwrap();
    let row = |own: &str, mark: Mark, strange: &str| {
        let document = |text: &str, mark: Mark| (format!("{text}\n"), vec![Mark::Shown as u8, mark as u8]);
        vec![document(own, mark), document(strange, Mark::Stranger)]
    };
    let expected = [
        row("b:2", Mark::Rejected, "b:1"),
        row("c:3", Mark::Learnt, "c:2"),
        // The first is held against the last.
        row("a:1", Mark::Learnt, "a:3"),
    ];
    assert_eq!(found, expected);
    let error = rows(lines[0], Layout::Judged).unwrap_err();
    assert!(error.contains("a.jsonl: line 1: is the only record"), "{error}");
}

#[test]
fn preferences_that_say_nothing_clear_are_refused_with_their_place() {
    let good = r#"{"prompt": "1", "chosen": "2", "rejected": "3"}"#;
    let cases = [
        (r#"{"prompt": "1", "chosen": "2"}"#, Layout::Pairs, "is not of the kind 'preference'"),
        (
            r#"{"prompt": "1", "chosen": "2", "rejected": null}"#,
            Layout::Pairs,
            "is not of the kind 'preference'",
        ),
        (
            r#"{"prompt": "1", "chosen": "2", "rejected": 3}"#,
            Layout::Pairs,
            "neither both texts nor both lists",
        ),
        (
            r#"{"prompt": "1", "chosen": ["2"], "rejected": ["3"]}"#,
            Layout::Pairs,
            "its 'chosen': message 2: is no object",
        ),
        (r#"{"prompt": 1, "chosen": "2", "rejected": "3"}"#, Layout::Pairs, "its 'prompt' is no text"),
        (r#"{"prompt": ["1"], "chosen": "2", "rejected": "3"}"#, Layout::Pairs, "its 'prompt' is no text"),
        (
            r#"{"prompt": "1", "chosen": {}, "rejected": "3"}"#,
            Layout::Pairs,
            "neither both texts nor both lists",
        ),
        (
            r#"{"prompt": "1", "chosen": [], "rejected": []}"#,
            Layout::Pairs,
            "has no message of the assistant",
        ),
        (
            r#"{"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}"#,
            Layout::Pairs,
            "what both answer is not known; give 'prompt'",
        ),
        (
            r#"{"prompt": "other", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}"#,
            Layout::Pairs,
            "its 'prompt' is not what the messages",
        ),
        (r#"{"prompt": "1", "chosen": "2", "rejected": "3""#, Layout::Pairs, "is no JSON object"),
        (r#"["prompt"]"#, Layout::Pairs, "for it is no object"),
        (
            r#"{"prompt": "1", "completion": "2", "label": 1}"#,
            Layout::Judged,
            "is not of the kind 'unpaired'",
        ),
        (
            r#"{"prompt": "1", "completion": "2", "label": "true"}"#,
            Layout::Judged,
            "is not of the kind 'unpaired'",
        ),
        (
            r#"{"prompt": "1", "completion": "2", "label": null}"#,
            Layout::Judged,
            "is not of the kind 'unpaired'",
        ),
        (
            r#"{"prompt": "1", "completion": ["2"], "label": true}"#,
            Layout::Judged,
            "neither both texts nor both lists",
        ),
        (
            r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "a"}], "label": true}"#,
            Layout::Judged,
            "and the record before it",
        ),
    ];
    for (bad, layout, why) in cases {
        let good = match layout {
            Layout::Judged => r#"{"prompt": "1", "completion": "2", "label": true}"#,
            _ => good,
        };
        let bad = bad.replace('\n', " ");
        let error = rows(&format!("{good}\n{bad}\n{good}"), layout).unwrap_err();
        assert!(error.contains("a.jsonl: line 2: ") && error.contains(why), "{bad}: {error}");
    }
}

#[test]
fn samples_and_objective_that_do_not_fit_are_refused_with_what_to_write() {
    let pair = r#"{"prompt": "1", "chosen": "2", "rejected": "3"}"#;
    let judged = r#"{"prompt": "1", "completion": "2", "label": true}"#;
    let plain = r#"{"prompt": "1", "completion": "2"}"#;
    for (text, layout, why) in [
        (pair, Layout::Packed, "write objective = \"dpo\""),
        (judged, Layout::Packed, "write objective = \"kto\""),
        (plain, Layout::Pairs, "learns from pairs: records with 'chosen' and 'rejected'"),
        (plain, Layout::Judged, "'label', which is true or false"),
        (pair, Layout::Judged, "'label', which is true or false"),
    ] {
        let error = rows(text, layout).unwrap_err();
        assert!(error.contains("a.jsonl: ") && error.contains(why), "{error}");
    }
}
