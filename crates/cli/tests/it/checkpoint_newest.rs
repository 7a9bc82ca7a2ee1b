//! Folders of checkpoints of which one is damaged: all count where they are verified, and none takes the place of the newest.

use std::path::Path;

use super::checkpoint::{checkpoint, copy_of, good, text, trained};
use super::support::{stderr, stdout};

#[test]
fn every_checkpoint_of_a_folder_counts_and_an_older_one_is_taken_by_its_name_alone() {
    let out = tempfile::tempdir().unwrap();
    let at = |name: &str| out.path().join(name).display().to_string();
    let shard = "global_step4/rank_00001.safetensors";
    let flip = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        *bytes.last_mut().unwrap() ^= 4;
        std::fs::write(path, bytes).unwrap();
    };
    let edit = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        std::fs::write(path, text.replace("\"global_steps\": 4", "\"global_steps\": 5")).unwrap();
    };
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path), &'a str, bool);
    let damages: [Damage<'_>; 6] = [
        (
            "an edited manifest",
            &|dir| edit(&dir.join("global_step4/manifest.json")),
            "was changed after it was written",
            true,
        ),
        (
            "no manifest",
            &|dir| std::fs::remove_file(dir.join("global_step4/manifest.json")).unwrap(),
            "manifest.json",
            true,
        ),
        (
            "a lost file",
            &|dir| std::fs::remove_file(dir.join(shard)).unwrap(),
            "rank_00001.safetensors",
            true,
        ),
        (
            "a lost checkpoint",
            &|dir| std::fs::remove_dir_all(dir.join("global_step4")).unwrap(),
            "there is no checkpoint 'global_step4'",
            true,
        ),
        (
            "a damaged older one",
            &|dir| flip(&dir.join("global_step2/rank_00000.safetensors")),
            "is damaged between bytes",
            false,
        ),
        (
            "an edited manifest and no hint",
            &|dir| {
                edit(&dir.join("global_step4/manifest.json"));
                std::fs::remove_file(dir.join("latest")).unwrap();
            },
            "was changed after it was written",
            true,
        ),
    ];
    for (number, (what, damage, why, is_newest)) in damages.into_iter().enumerate() {
        let copy = copy_of(trained());
        damage(copy.path());
        let verified = checkpoint(&["verify", text(copy.path())]);
        assert_eq!(verified.status.code(), Some(1), "{what}: {}", stdout(&verified));
        assert!(stderr(&verified).contains(why), "{what}: {}", stderr(&verified));
        let other = if is_newest { "global_step2: whole" } else { "global_step4: whole" };
        assert!(stdout(&verified).contains(other), "{what}: {}", stdout(&verified));
        good(&["inspect", text(copy.path())]);
        for (command, output) in [
            ("to-fp32", format!("{number}.safetensors")),
            ("export-hf", format!("{number}-model")),
            ("export-deepspeed", format!("{number}-theirs")),
            ("to-universal", format!("{number}-universal")),
            ("diff", String::new()),
        ] {
            let output = if command == "diff" { text(trained()).to_owned() } else { at(&output) };
            let words = [command, text(copy.path()), &output];
            let taken = checkpoint(&words);
            let said = stderr(&taken);
            assert_eq!(taken.status.success(), !is_newest, "{what}, {command}: {said}");
            if command != "diff" && is_newest {
                assert!(
                    said.contains(why) && said.contains("--tag global_step2"),
                    "{what}, {command}: {said}"
                );
                assert!(!Path::new(&output).exists(), "{what}, {command}");
                good(&[&words[..], &["--tag", "global_step2"]].concat());
            }
        }
    }
}
