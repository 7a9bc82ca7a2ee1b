//! Saves on disks that fail: real processes that are killed, real file systems that are full or may not be written.

use super::support;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::support::{is_running, may_mount, stderr, stdout, wait_until};

const RECIPE: &str = r#"
    name = "small"
    steps = 6
    [model]
    preset = "gpt2"
    layers = 1
    width = 64
    heads = 2
    [data]
    text = ["text.txt"]
    sequence = 16
    [save]
    every = 2
    background = false
    [ds_config]
    train_micro_batch_size_per_gpu = 2
    steps_per_print = 1000000
    optimizer = { type = "AdamW", params = { lr = 3e-3 } }
"#;

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..4000u32).map(|n| char::from(b'a' + (n * n % 89 % 26) as u8)).collect();
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
        Workplace(folder)
    }

    fn checkpoints(&self) -> PathBuf {
        self.0.path().join("runs/small/checkpoints")
    }

    fn ferrospeed(&self, words: &[&str]) -> Output {
        support::output_of(support::binary().args(words).current_dir(self.0.path()))
    }

    /// Runs a shell script where file systems may be mounted that no one else sees; `None` where that is not allowed.
    fn with_mounts(&self, script: &str) -> Option<Output> {
        if !may_mount() {
            return None;
        }
        let output = Command::new("unshare")
            .args(["-rm", "sh", "-ec", script])
            .env("FERROSPEED", env!("CARGO_BIN_EXE_ferrospeed"))
            .env("CHECKPOINTS", self.checkpoints())
            .current_dir(self.0.path())
            .output();
        Some(output.unwrap())
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

#[test]
fn a_run_killed_while_it_saves_leaves_whole_checkpoints() {
    let place = Workplace::new();
    let is_unfinished = |name: &String| name.contains(".partial-");
    let mut killed_within_a_save = 0;
    for round in 0..12 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrospeed"));
        command.args(["train", "recipe.toml", "-n", "2", "--resume", "--set", "steps=1000000"]);
        command.args(["--set", "save.every=1", "--set", "save.keep_last=3"]);
        let mut launcher = command.current_dir(place.0.path()).stdout(Stdio::null()).spawn().unwrap();
        let dir = place.checkpoints();
        // Every round gets some steps further; then it dies in the first save that is seen.
        let goal = round * 2 + 2;
        let newest = || {
            let steps =
                names(&dir).into_iter().filter_map(|name| name.strip_prefix("global_step")?.parse().ok());
            steps.max().unwrap_or(0)
        };
        wait_until("some checkpoints", || dir.is_dir() && newest() >= goal);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !names(&dir).iter().any(is_unfinished) && std::time::Instant::now() < end {}
        let children =
            std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", launcher.id())).unwrap();
        let children: Vec<String> = children.split_whitespace().map(str::to_owned).collect();
        Command::new("kill").arg("-KILL").args(&children).status().unwrap();
        launcher.kill().unwrap();
        support::wait_for(&mut launcher);
        wait_until("the ranks are gone", || children.iter().all(|pid| !is_running(pid)));

        killed_within_a_save += usize::from(names(&dir).iter().any(is_unfinished));
        for tag in names(&dir).iter().filter(|name| name.starts_with("global_step")) {
            let verified = place.ferrospeed(&["checkpoint", "verify", dir.to_str().unwrap(), "--tag", tag]);
            assert!(verified.status.success(), "round {round}, {tag}: {}", stderr(&verified));
        }
    }
    assert!(killed_within_a_save > 0, "no round died within a save");
    let steps = names(&place.checkpoints())
        .into_iter()
        .filter_map(|name| name.strip_prefix("global_step").and_then(|step| step.parse::<u64>().ok()));
    let more = format!("steps={}", steps.max().unwrap() + 2);
    let last = place.ferrospeed(&["train", "recipe.toml", "-n", "2", "--resume", "--set", &more]);
    assert!(last.status.success(), "{}", stderr(&last));
    assert!(!names(&place.checkpoints()).iter().any(is_unfinished), "leftovers are swept");
}

#[test]
fn a_full_disk_costs_the_new_checkpoint_and_never_the_old_one() {
    // Room for one checkpoint of some 800 kB and a spare megabyte, not for two; then none for another file, which free
    // space does not tell.
    for (limit, reason) in [("size=2200k", "are free"), ("size=64m,nr_inodes=7", "No space left on device")] {
        let place = Workplace::new();
        std::fs::create_dir_all(place.checkpoints()).unwrap();
        let script = format!(
            "mount -t tmpfs -o {limit} tmpfs \"$CHECKPOINTS\"
             if $FERROSPEED train recipe.toml; then exit 90; fi
             $FERROSPEED checkpoint verify \"$CHECKPOINTS\"
             $FERROSPEED checkpoint inspect \"$CHECKPOINTS\" | grep -q 'steps *2 '"
        );
        let Some(output) = place.with_mounts(&script) else { return };
        let said = format!("{limit}:\n{}\n{}", stdout(&output), stderr(&output));
        assert!(output.status.success(), "{said}");
        // In the middle of a run it is a warning; at its end, where there is no other chance, an error.
        assert!(stderr(&output).contains("training goes on without a new checkpoint"), "{said}");
        assert!(stderr(&output).matches(reason).count() >= 2, "{said}");
        assert!(stdout(&output).contains("step     6/6"), "{said}");
    }
}

#[test]
fn a_run_whose_checkpoints_or_weights_have_no_room_is_refused_before_it_begins() {
    for (at, limit, needed) in
        [("checkpoints", "size=1500k", "need a checkpoint "), ("model", "size=100k", "need the weights ")]
    {
        for ranks in ["1", "2"] {
            let place = Workplace::new();
            let run = place.0.path().join("runs/small");
            std::fs::create_dir_all(run.join(at)).unwrap();
            let script = format!(
                "mount -t tmpfs -o {limit} tmpfs runs/small/{at}
                 exec \"$FERROSPEED\" train recipe.toml -n {ranks}"
            );
            let Some(output) = place.with_mounts(&script) else { return };
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains(needed) && said.contains("--force starts it anyway"), "{said}");
            assert!(!run.join("log.jsonl").exists(), "{said}");
        }
    }
}

#[test]
fn a_folder_that_may_not_be_written_is_named() {
    let place = Workplace::new();
    std::fs::create_dir_all(place.checkpoints()).unwrap();
    let script = "mount -t tmpfs -o ro tmpfs \"$CHECKPOINTS\"; $FERROSPEED train recipe.toml -n 2";
    let Some(output) = place.with_mounts(script) else { return };
    let said = stderr(&output);
    assert!(!output.status.success());
    assert!(
        said.contains("checkpoints/.ferrospeed.lock") && said.contains("Read-only file system"),
        "{said}"
    );
    assert!(said.contains("training goes on without a new checkpoint"), "{said}");
}

#[test]
fn another_writer_in_the_folder_is_refused_and_named() {
    let place = Workplace::new();
    let trained = place.ferrospeed(&["train", "recipe.toml"]);
    assert!(trained.status.success(), "{}", stderr(&trained));
    let lock = std::fs::File::open(place.checkpoints().join(".ferrospeed.lock")).unwrap();
    lock.lock().unwrap();
    let before = names(&place.checkpoints());
    let second = place.ferrospeed(&["train", "recipe.toml", "--resume", "--set", "steps=10"]);
    assert!(!second.status.success());
    assert!(stderr(&second).contains("another job is writing a checkpoint here"), "{}", stderr(&second));
    assert_eq!(names(&place.checkpoints()), before);
}

#[test]
fn what_does_not_fit_on_a_disk_leaves_nothing_there() {
    let place = Workplace::new();
    assert!(place.ferrospeed(&["train", "recipe.toml"]).status.success());
    let exported = place.ferrospeed(&["checkpoint", "export-deepspeed", "runs/small/checkpoints", "theirs"]);
    assert!(exported.status.success(), "{}", stderr(&exported));
    std::fs::create_dir(place.0.path().join("disk")).unwrap();
    let script = r#"
        mount -t tmpfs -o size=64k tmpfs disk
        dd if=/dev/zero of=disk/other bs=4k count=15 2> /dev/null
        echo kept > disk/kept
        for output in disk/ours disk/deep/er/ours; do
            ! "$FERROSPEED" checkpoint import-deepspeed theirs "$output" || exit 9
        done
        for output in disk/profile.txt disk/kept; do
            ! "$FERROSPEED" profile runs/small/model --detailed --output "$output" || exit 9
        done
        ls -A disk
        cat disk/kept
    "#;
    let Some(output) = place.with_mounts(script) else { return };
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), "kept\nother\nkept\n", "{}", stderr(&output));
}

#[test]
fn a_model_that_does_not_fit_on_a_disk_is_not_there_and_an_earlier_one_stays() {
    let place = Workplace::new();
    std::fs::create_dir_all(place.0.path().join("runs/small/model")).unwrap();
    // A model has some 270 kB: nothing fits, then one of two.
    let script = r#"
        mount -t tmpfs -o size=64k tmpfs runs/small/model
        code=0; "$FERROSPEED" train recipe.toml --force || code=$?
        echo "code $code, model: $(ls -A runs/small/model)"
        test -s runs/small/report.html
        "$FERROSPEED" checkpoint export-hf runs/small elsewhere > /dev/null
        umount runs/small/model
        mount -t tmpfs -o size=400k tmpfs runs/small/model
        "$FERROSPEED" train recipe.toml --resume --set steps=7 > /dev/null
        (cd runs/small/model && cksum *) > before
        code=0; "$FERROSPEED" train recipe.toml --resume --force --set steps=8 -n 2 > /dev/null || code=$?
        (cd runs/small/model && cksum *) > after
        cmp before after
        echo "code $code, model: $(cd runs/small/model && echo $(ls -A))"
    "#;
    let Some(output) = place.with_mounts(script) else { return };
    let (said, told) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{said}{told}");
    assert!(said.contains("code 1, model: \n"), "{said}{told}");
    assert!(said.contains("code 1, model: config.json model.safetensors\n"), "{said}{told}");
    assert!(told.contains("its weights are not in runs/small/model"), "{told}");
    assert!(told.contains("global_step6 has them, and `ferrospeed checkpoint export-hf`"), "{told}");
    assert_eq!(names(&place.0.path().join("elsewhere")), ["config.json", "model.safetensors"]);
}

#[test]
fn a_resume_on_a_full_disk_leaves_no_file_without_its_content() {
    let place = Workplace::new();
    std::fs::create_dir_all(place.0.path().join("runs/small")).unwrap();
    let script = r#"
        mount -t tmpfs -o size=8m tmpfs runs/small
        "$FERROSPEED" train recipe.toml > /dev/null
        echo '{"state": "failed", "why": "of yore"}' > runs/small/outcome.json
        dd if=/dev/zero of=runs/small/other bs=4k 2> /dev/null || true
        cp -r runs/small/config before
        code=0; "$FERROSPEED" train recipe.toml --resume --set steps=9 > /dev/null || code=$?
        diff -r before runs/small/config
        echo "code $code, empty: $(find runs/small -type f -size 0 ! -name '*lock' ! -name eval.jsonl) $(cat runs/small/outcome.json)"
    "#;
    let Some(output) = place.with_mounts(script) else { return };
    let said = stdout(&output);
    assert!(output.status.success(), "{said}{}", stderr(&output));
    assert!(said.contains("code 1, empty:  {"), "{said}{}", stderr(&output));
}
