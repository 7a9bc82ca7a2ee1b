//! `ferrospeed train` on a terminal: a pseudo-terminal and as much of an emulator as the block needs.

use super::support;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use nix::pty::{Winsize, openpty};

/// What a terminal shows. It never scrolls: everything that was ever written stays to be looked at.
#[derive(Default)]
struct Emulator {
    rows: Vec<Vec<char>>,
    row: usize,
    column: usize,
}

impl Emulator {
    fn feed(&mut self, text: &str) {
        let mut characters = text.chars();
        while let Some(character) = characters.next() {
            match character {
                '\n' => self.row += 1,
                '\r' => self.column = 0,
                '\u{1b}' => {
                    assert_eq!(characters.next(), Some('['), "only CSI sequences are used");
                    let sequence: Vec<char> =
                        characters.by_ref().take_while(|c| !c.is_alphabetic()).collect();
                    // `take_while` has eaten the letter: find out which it was.
                    let consumed = text.len() - characters.as_str().len();
                    let letter = text[..consumed].chars().next_back().unwrap();
                    let number: usize = sequence.iter().collect::<String>().parse().unwrap_or(1);
                    match letter {
                        'A' => self.row = self.row.checked_sub(number).expect("not above the first line"),
                        'J' => {
                            self.rows.truncate(self.row + 1);
                            if let Some(row) = self.rows.get_mut(self.row) {
                                row.truncate(self.column);
                            }
                        }
                        'm' => {}
                        other => panic!("CSI {other} is not expected"),
                    }
                }
                printed => {
                    if self.rows.len() <= self.row {
                        self.rows.resize(self.row + 1, Vec::new());
                    }
                    let row = &mut self.rows[self.row];
                    if row.len() <= self.column {
                        row.resize(self.column + 1, ' ');
                    }
                    row[self.column] = printed;
                    self.column += 1;
                }
            }
        }
    }

    fn lines(&self) -> Vec<String> {
        self.rows.iter().map(|row| row.iter().collect()).collect()
    }
}

const WIDTH: u16 = 96;

/// Runs a recipe on a pseudo-terminal and returns what came out, as it was written.
fn run_on_terminal(place: &Path, ranks: &str, terminal: &str) -> String {
    let size = Winsize { ws_row: 30, ws_col: WIDTH, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(Some(&size), None).unwrap();
    let mut command = support::binary();
    command
        .args(["train", "recipe.toml", "-n", ranks, "--out", &format!("run-{ranks}-{terminal}")])
        .current_dir(place)
        .env("TERM", terminal)
        .env_remove("NO_COLOR")
        .stdin(Stdio::null())
        .stdout(Stdio::from(pty.slave.try_clone().unwrap()))
        .stderr(Stdio::from(pty.slave));
    let mut child = command.spawn().unwrap();
    // The command's copies of the terminal must not outlive the child, or the master never sees its end.
    drop(command);
    let mut master = File::from(pty.master);
    let reader = std::thread::spawn(move || {
        let mut written = Vec::new();
        let mut buffer = [0; 4096];
        // On Linux the end is an I/O error, once every copy of the terminal is closed.
        while let Ok(count @ 1..) = master.read(&mut buffer) {
            written.extend_from_slice(&buffer[..count]);
        }
        written
    });
    let status = support::wait_for(&mut child);
    let text = String::from_utf8(reader.join().unwrap()).expect("text");
    assert!(status.success(), "{text}");
    text
}

fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("text.txt"), "the quick brown fox\n".repeat(400)).unwrap();
    let recipe = r#"
        name = "small"
        steps = 12
        [model]
        preset = "gpt2"
        layers = 1
        width = 32
        heads = 1
        [data]
        text = ["text.txt"]
        sequence = 32
        validation = 0.1
        [eval]
        every = 6
        [sample]
        prompt = "the "
        tokens = 4
        [ds_config]
        train_batch_size = 8
        steps_per_print = 4
        optimizer = { type = "AdamW", params = { lr = 1e-2 } }
        zero_optimization = { stage = 1 }
    "#;
    std::fs::write(place.path().join("recipe.toml"), recipe).unwrap();
    place
}

#[test]
fn a_terminal_shows_one_block_that_is_drawn_over() {
    let place = place();
    for ranks in ["1", "2"] {
        let written = run_on_terminal(place.path(), ranks, "xterm");
        let mut screen = Emulator::default();
        screen.feed(&written);
        let lines = screen.lines();
        let shown = lines.join("\n");
        let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
        assert_eq!(count("small  step 12/12  ━"), 1, "{shown}");
        assert_eq!(count("small  step "), 1, "an old block was left behind:\n{shown}");
        for part in [
            "100 %  done",
            "  lr 1.00e-2  norm ",
            "  validation ",
            "tokens/s",
            "% of the measured",
            "memory ",
            "  gradients ",
            "finished 12 steps",
        ] {
            assert_eq!(count(part), 1, "'{part}' in:\n{shown}");
        }
        assert!(written.matches("small").count() > 3, "the block moved while the run went");
        let block = lines.iter().position(|line| line.contains("small  step")).unwrap();
        assert!(
            lines[block..block + 4].iter().all(|line| line.chars().count() < usize::from(WIDTH)),
            "{shown}"
        );
        assert!(shown.contains('▁') && shown.contains('█'), "a sparkline and a bar:\n{shown}");
        assert_eq!(count("step     4/12"), 0, "no plain lines on a terminal:\n{shown}");
    }
    // The ranks' logs have the lines.
    let logs = std::fs::read_dir(place.path().join("run-2-xterm/logs")).unwrap();
    let text: String = logs.map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    assert!(text.contains("step     4/12  loss "), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
}

#[test]
fn a_terminal_that_cannot_be_drawn_over_gets_lines() {
    let place = place();
    let written = run_on_terminal(place.path(), "2", "dumb");
    assert!(!written.contains('\u{1b}'), "{written}");
    for line in [
        "step     1/12  loss ",
        "step     4/12  loss ",
        "step     6/12  validation loss ",
        "finished 12 steps",
    ] {
        assert!(written.contains(line), "'{line}' in:\n{written}");
    }
}
