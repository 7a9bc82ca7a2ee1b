//! Two ends of a sealed connection, and somebody between them.

use std::net::TcpListener;
use std::time::Duration;

use super::*;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

fn pair() -> [Arc<TcpStream>; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let calling = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [calling, listener.accept().unwrap().0].map(Arc::new)
}

fn seals(secrets: [[u8; 32]; 2], about: [&[u8]; 2]) -> [std::result::Result<Seal, Unproven>; 2] {
    let [calling, listening] = pair();
    let agreement = |side: usize| Agreement { secret: &secrets[side], about: about[side] };
    std::thread::scope(|scope| {
        let answered = scope.spawn(|| {
            let mut timed = Timed { stream: &listening, deadline: soon() };
            let answered = Seal::answer(&mut timed, &agreement(1));
            // A caller that still waits for an answer hears that there is none.
            let _ = listening.shutdown(std::net::Shutdown::Both);
            answered
        });
        let called = Seal::call(&mut Timed { stream: &calling, deadline: soon() }, &agreement(0));
        [called, answered.join().unwrap()]
    })
}

/// Two ends of one sealed conversation over streams of the test's own.
fn ends(streams: [Arc<TcpStream>; 2]) -> [Connection; 2] {
    let [calls, answers] = seals([[7; 32]; 2], [b"a link"; 2]).map(|seal| seal.ok());
    let [first, second] = streams;
    assert!(calls.is_some() && answers.is_some());
    [Connection::new(first, calls), Connection::new(second, answers)]
}

#[test]
fn another_secret_or_another_link_makes_no_seal() {
    assert!(seals([[7; 32]; 2], [b"a link"; 2]).iter().all(std::result::Result::is_ok));
    let [called, answered] = seals([[7; 32], [8; 32]], [b"a link"; 2]);
    assert!(called.is_err() && matches!(answered, Err(Unproven::Stranger)));
    let [called, answered] = seals([[7; 32]; 2], [b"a link", b"b link"]);
    assert!(called.is_err() && matches!(answered, Err(Unproven::Stranger)));
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * at / 7) as u8).collect()
}

#[test]
fn content_of_any_length_arrives_in_pieces_of_any_length() {
    let [one, other] = ends(pair());
    let lengths = [0, 1, 2, 65_518, 65_519, 65_520, 300_000];
    std::thread::scope(|scope| {
        scope.spawn(|| lengths.iter().for_each(|length| (&one).write_all(&content(*length)).unwrap()));
        for length in lengths {
            let mut out = vec![0u8; length];
            let (first, rest) = out.split_at_mut(length / 3);
            (&other).read_exact(first).unwrap();
            other.until(soon()).read_exact(rest).unwrap();
            assert!(out == content(length), "{length} bytes");
        }
    });
    drop(one);
    assert_eq!((&other).read(&mut [0; 9]).unwrap(), 0, "an end is an end");
}

#[test]
fn a_socket_that_takes_nothing_more_keeps_the_rest_for_later() {
    let [one, other] = ends(pair());
    one.stream().set_nonblocking(true).unwrap();
    let whole = content(40 << 20);
    let mut given = 0;
    while given < whole.len() {
        match one.offer(&whole[given..]) {
            Ok(count) => given += count,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                break;
            }
        }
    }
    assert!(given < whole.len(), "loopback does not hold 40 MiB");
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut out = vec![0u8; whole.len()];
            other.until(soon()).read_exact(&mut out).map(|()| out)
        });
        let limit = soon();
        while given < whole.len() || !one.is_flushed().unwrap() {
            assert!(Instant::now() < limit);
            match one.offer(&whole[given..]) {
                Ok(count) => given += count,
                Err(_) => std::thread::yield_now(),
            }
        }
        assert!(reading.join().unwrap().unwrap() == whole);
    });
}

/// What the sender puts on the wire for two messages.
fn wire_of_two(content: &[u8]) -> (Vec<u8>, Connection, Arc<TcpStream>) {
    let ([from, tap], [to, reader]) = (pair(), pair());
    let [one, other] = ends([from, reader]);
    (&one).write_all(content).unwrap();
    (&one).write_all(content).unwrap();
    drop(one);
    let mut wire = Vec::new();
    (&*tap).read_to_end(&mut wire).unwrap();
    (wire, other, to)
}

#[test]
fn the_wire_does_not_show_the_content_and_says_nothing_twice() {
    let secret = b"a gradient that is nobody's business";
    let (wire, other, to) = wire_of_two(secret);
    assert!(!wire.windows(8).any(|window| secret.windows(8).any(|part| part == window)));
    let (first, second) = wire.split_at(wire.len() / 2);
    assert!(first != second && first.len() == second.len());
    (&*to).write_all(&wire).unwrap();
    let mut out = vec![0u8; 2 * secret.len()];
    other.until(soon()).read_exact(&mut out).unwrap();
    assert_eq!(out, [secret.as_slice(), secret].concat());
}

#[test]
fn what_is_changed_left_out_or_repeated_on_the_way_is_an_error() {
    let secret = b"a gradient that is nobody's business";
    let half = wire_of_two(secret).0.len() / 2;
    let cases: [(&str, &dyn Fn(&mut Vec<u8>)); 5] = [
        ("a bit of the content", &|wire| wire[9] ^= 4),
        ("a bit of the tag", &|wire| *wire.last_mut().unwrap() ^= 1),
        ("a length", &|wire| wire[0] = 3),
        ("a message is left out", &|wire| drop(wire.drain(..half))),
        ("a message is repeated", &|wire| wire.extend_from_within(..half)),
    ];
    for (what, change) in cases {
        let (mut wire, other, to) = wire_of_two(secret);
        change(&mut wire);
        (&*to).write_all(&wire).unwrap();
        drop(to);
        let mut all = Vec::new();
        let error = other.until(soon()).read_to_end(&mut all).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{what}: {error}");
        assert!(error.to_string().contains("has changed it"), "{what}: {error}");
    }
}
