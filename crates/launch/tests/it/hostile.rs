//! Seeded random input for every grammar: no panic, no hang, bounded memory, and what parses stays in bounds.

use ferrospeed_launch::hostfile::{HostPool, MAX_SLOTS_PER_HOST};
use ferrospeed_launch::{cores, filter, hostfile, node_count, shell, world_info};
use ferrospeed_testkit::property::{Random, seeds};

/// Text made of the grammar's own pieces and of rubbish.
fn text(random: &mut Random, pieces: &[&str], most: usize) -> String {
    let count = random.below(most);
    let mut text = String::new();
    for _ in 0..count {
        match random.below(8) {
            0 => text.extend(char::from_u32(random.next() as u32 % 0x11_0000)),
            1 => text.push_str(&random.next().to_string()),
            _ => text.push_str(random.pick(pieces)),
        }
    }
    text
}

const ROUNDS: u64 = 20_000;

#[test]
fn any_hostfile_is_parsed_or_refused() {
    let pieces = [
        "a",
        "b",
        "worker-0",
        " ",
        "\t",
        "\n",
        "\r\n",
        "slots=",
        "4",
        "0",
        "#",
        "=",
        "-",
        "x",
        "max_slots=9",
        "c slots=4\n",
        "\nd slots=02 #",
        "# note\n",
        "\0",
    ];
    let mut accepted = 0;
    for seed in seeds(ROUNDS) {
        let text = text(&mut Random(seed), &pieces, 24);
        let Ok(pool) = hostfile::parse(&text) else { continue };
        accepted += 1;
        assert!(!pool.is_empty() && pool.len() <= text.lines().count(), "{text:?}");
        assert!(pool.values().all(|&slots| slots <= MAX_SLOTS_PER_HOST), "{text:?}");
        assert!(
            pool.keys().all(|host| !host.starts_with('-') && !host.contains(char::is_whitespace)),
            "{text:?}"
        );
    }
    assert!(accepted > 10, "the generator must also make good hostfiles, made {accepted}");
}

#[test]
fn any_filter_gives_a_subset_of_the_pool_or_an_error() {
    let pool: HostPool = [("a".to_owned(), 4), ("b".to_owned(), 1), ("empty".to_owned(), 0)].into();
    let pieces = ["a", "b", "empty", ":", "@", ",", "0", "1", "3", "-1", " ", "c"];
    let mut accepted = 0;
    for seed in seeds(ROUNDS) {
        let text = text(&mut Random(seed), &pieces, 10);
        let filtered = match seed % 2 {
            0 => filter::apply(&pool, &text, ""),
            _ => filter::apply(&pool, "", &text),
        };
        let Ok(active) = filtered else { continue };
        accepted += 1;
        let order: Vec<usize> =
            active.keys().map(|host| pool.get_index_of(host).expect("a known host")).collect();
        assert!(order.is_sorted(), "{text:?}");
        for (host, slots) in &active {
            let mut distinct = slots.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), slots.len(), "{text:?} repeats a slot");
            assert!(slots.iter().all(|slot| *slot < pool[host]), "{text:?}");
        }
    }
    assert!(accepted > 100, "the generator must also make good filters, made {accepted}");
}

#[test]
fn other_grammars_never_panic_and_core_lists_survive_a_round_trip() {
    let pieces = ["0", "1", "7", "-", ",", ":", " ", "65535", "99999999999", "'", "\"", "\\", "e30=", "None"];
    for seed in seeds(ROUNDS) {
        let text = text(&mut Random(seed), &pieces, 12);
        if let Ok(list) = cores::parse_core_list(&text) {
            assert_eq!(cores::parse_core_list(&cores::compress(&list)).unwrap(), list, "{text:?}");
        }
        if let Ok(words) = shell::split(&text) {
            assert_eq!(shell::split(&shell::join(&words)).unwrap(), words, "{text:?}");
        }
        let _ = node_count::parse(&text, true);
        let _ = world_info::decode(&text);
    }
}

#[test]
fn a_huge_hostfile_is_refused_quickly() {
    let text = "a".repeat(17 << 20);
    assert!(hostfile::parse(&text).is_err());
    let many: String = (0..100_000).map(|host| format!("host-{host} slots=8\n")).collect();
    assert_eq!(hostfile::parse(&many).unwrap().len(), 100_000);
}
