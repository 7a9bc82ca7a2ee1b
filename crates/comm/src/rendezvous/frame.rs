//! The control connection's wire format, once both sides have proven themselves: frames of a length, a checksum and a JSON
//! body.
//!
//! Frames are small and bounded; a peer that announces more, or sends something that is not a frame, is cut off.

use std::io::{ErrorKind, Read, Write};

use serde::{Deserialize, Serialize};

use crate::state::Announcement;

/// No frame is longer.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// What a rank says about itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) version: String,
    pub(crate) config_hash: String,
    pub(crate) host_identity: String,
    pub(crate) pid: u32,
}

/// What the members of a complete job learn.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// The identity of each rank's host.
    pub(crate) host_identities: Vec<String>,
    /// A random name for what this job keeps on disk.
    pub(crate) job_name: String,
}

/// Everything that travels on a control connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// Member to hub, first.
    Hello(Hello),
    /// Hub to member: not in this job, and why.
    Refused(String),
    /// Hub to member: everybody is here.
    Welcome(Welcome),
    /// Member to hub: a value for others.
    Set(String, Vec<u8>),
    /// Member to hub: a value that nobody needs any more.
    Remove(String),
    /// Member to hub: send the value as soon as it is there.
    Wait(String),
    /// Hub to member: the value.
    Value(String, Vec<u8>),
    /// Either way: alive, and what the member, or rank 0, did last.
    Beat(Option<String>),
    /// Either way: something failed.
    Announce(Announcement),
    /// Member to hub: leaving in good order.
    Bye,
    /// Hub to member: that rank left in good order.
    Left(usize),
}

pub(crate) fn write_frame(stream: &mut impl Write, frame: &Frame) -> std::io::Result<()> {
    let body = serde_json::to_vec(frame)?;
    let mut bytes = Vec::with_capacity(body.len() + 8);
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(crc32fast::hash(&body).to_le_bytes());
    bytes.extend(body);
    stream.write_all(&bytes)
}

pub(crate) fn read_frame(stream: &mut impl Read) -> std::io::Result<Frame> {
    let [mut length, mut checksum] = [[0u8; 4]; 2];
    stream.read_exact(&mut length)?;
    stream.read_exact(&mut checksum)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_FRAME_BYTES {
        return Err(std::io::Error::new(ErrorKind::InvalidData, format!("a frame of {length} bytes")));
    }
    let mut body = vec![0u8; length as usize];
    stream.read_exact(&mut body)?;
    if crc32fast::hash(&body) != u32::from_le_bytes(checksum) {
        return Err(std::io::Error::new(ErrorKind::InvalidData, "a frame that was changed on its way"));
    }
    serde_json::from_slice(&body).map_err(|error| std::io::Error::new(ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use ferrospeed_testkit::property::{Random, seeds};

    use super::*;

    #[test]
    fn damaged_frames_are_read_or_refused_and_take_no_more_than_they_announce() {
        let frames = [
            Frame::Set("key".into(), vec![1, 2, 3]),
            Frame::Welcome(Welcome { host_identities: vec!["a".into(), "b".into()], job_name: "job".into() }),
            Frame::Beat(Some("all_reduce 7".into())),
            Frame::Left(3),
        ];
        for seed in seeds(20_000) {
            let (mut random, mut wire) = (Random(seed), Vec::new());
            write_frame(&mut wire, &frames[seed as usize % frames.len()]).unwrap();
            random.damage(&mut wire);
            let mut rest = wire.as_slice();
            // Whatever is read is a frame that can be written again.
            if let Ok(frame) = read_frame(&mut rest) {
                let mut again = Vec::new();
                write_frame(&mut again, &frame).unwrap();
                assert!(read_frame(&mut again.as_slice()).is_ok(), "seed {seed}: {wire:?}");
            }
        }
    }

    #[test]
    fn frames_survive_the_wire_and_garbage_does_not_pass() {
        let mut wire = Vec::new();
        write_frame(&mut wire, &Frame::Set("key".into(), vec![1, 2])).unwrap();
        assert!(
            matches!(read_frame(&mut wire.as_slice()), Ok(Frame::Set(key, value)) if key == "key" && value == [1, 2])
        );
        assert!(read_frame(&mut b"GET / HTTP/1.1\r\n".as_slice()).is_err());
        assert!(read_frame(&mut [3, 0, 0, 0, b'{', b'}', b'}'].as_slice()).is_err());
        // One bit, wherever it is, is noticed: a number in the text would read as another.
        for bit in 0..wire.len() * 8 {
            let mut changed = wire.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(read_frame(&mut changed.as_slice()).is_err(), "bit {bit}");
        }
    }
}
