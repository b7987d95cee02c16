//! What processes send each other, as bytes: calls with their numbers, and notices that a rank has ended or failed.

use std::time::Duration;

use half::bf16;

use crate::message::{Message, Number};
use crate::{Call, Collective, Error};

/// The first word of every frame; its last byte is the version of what follows.
const MAGIC: u64 = u64::from_le_bytes(*b"convoke\x01");
/// Numbers of more bytes follow the frame of their call as messages of their own, so that they are not copied.
const INLINE: usize = 1 << 11;
/// Words before the text of a frame: magic, kind, bytes of the text, bytes of the numbers.
const PREAMBLE: usize = 4;
/// No frame has more bytes.
pub(super) const LONGEST_FRAME: usize = 1 << 20;

/// What a rank sends.
#[derive(Debug, PartialEq)]
pub(super) enum Frame {
    /// The rank has come to a call.
    Came(Call, Numbers),
    /// The rank has ended, after this many calls.
    Left(u64),
    /// The rank has failed, in this call.
    Failed(u64, Error),
    /// The process of the rank ends; true if it has met no error.
    Goodbye(bool),
    /// The rank is alive, and will come.
    Alive,
}

/// What a rank brings to a call.
#[derive(Debug, PartialEq)]
pub(super) enum Numbers {
    /// The bytes from here to there in the frame.
    Inline(std::ops::Range<usize>),
    /// The number of bytes, which follow in messages of their own.
    Follow(usize),
}

/// The frame of a call to which a rank brings `numbers`, and whether these follow it.
pub(super) fn came(call: &Call, numbers: &Message) -> (Message, bool) {
    let mut text = Vec::new();
    put_call(&mut text, call);
    let follow = numbers.bytes().len() > INLINE;
    let inline = if follow { &[] } else { numbers.bytes() };
    (frame(0, &text, numbers.bytes().len(), inline), follow)
}

/// The frame of a rank that has ended after `calls` calls.
pub(super) fn left(calls: u64) -> Message {
    frame(1, &calls.to_le_bytes(), 0, &[])
}

/// The frame of a rank that has failed in call `number`.
pub(super) fn failed(number: u64, error: &Error) -> Message {
    let mut text = number.to_le_bytes().to_vec();
    put_error(&mut text, error);
    frame(2, &text, 0, &[])
}

/// The frame of a process that ends.
pub(super) fn goodbye(healthy: bool) -> Message {
    frame(3, &u64::from(healthy).to_le_bytes(), 0, &[])
}

/// The frame of a rank that is at work.
pub(super) fn alive() -> Message {
    frame(4, &[], 0, &[])
}

fn frame(kind: u64, text: &[u8], numbers: usize, inline: &[u8]) -> Message {
    let padded = text.len().next_multiple_of(size_of::<u64>());
    let preamble = [MAGIC, kind, text.len() as u64, numbers as u64];
    let mut bytes = Vec::with_capacity(size_of_val(&preamble) + padded + inline.len());
    bytes.extend_from_slice(bytemuck::cast_slice(&preamble));
    bytes.extend_from_slice(text);
    bytes.resize(size_of_val(&preamble) + padded, 0);
    bytes.extend_from_slice(inline);
    Message::small(&bytes)
}

/// The frame in these bytes, if it is one of this version.
pub(super) fn parse(bytes: &[u8]) -> Option<Frame> {
    let preamble: [u64; PREAMBLE] = bytemuck::pod_read_unaligned(bytes.get(..PREAMBLE * size_of::<u64>())?);
    let [MAGIC, kind, text, numbers] = preamble else { return None };
    let (text, numbers) = (usize::try_from(text).ok()?, usize::try_from(numbers).ok()?);
    let start = size_of_val(&preamble);
    let mut rest = Reader(bytes.get(start..start.checked_add(text)?)?);
    let frame = match kind {
        0 => {
            let call = rest.call()?;
            let size = size(call.dtype)?;
            // A rank brings no more numbers than the call has, if that is known: a claim of more would cost waiting and memory.
            let most = call.elements.map_or(usize::MAX, |elements| elements.saturating_mul(size));
            if numbers % size != 0 || numbers > most {
                return None;
            }
            let inline = start + text.next_multiple_of(size_of::<u64>());
            let carried = bytes.len().checked_sub(inline)?;
            match numbers > INLINE {
                true => Frame::Came(call, Numbers::Follow(numbers)),
                false if carried == numbers => Frame::Came(call, Numbers::Inline(inline..bytes.len())),
                false => return None,
            }
        }
        1 => Frame::Left(rest.number()?),
        2 => Frame::Failed(rest.number()?, rest.error()?),
        3 => Frame::Goodbye(rest.number()? == 1),
        4 => Frame::Alive,
        _ => return None,
    };
    rest.0.is_empty().then_some(frame)
}

/// The types of numbers, with their bytes.
const DTYPES: [(&str, usize); 5] = [
    (f32::DTYPE, size_of::<f32>()),
    (f64::DTYPE, size_of::<f64>()),
    (u64::DTYPE, size_of::<u64>()),
    (u8::DTYPE, size_of::<u8>()),
    (bf16::DTYPE, size_of::<bf16>()),
];

fn size(dtype: &str) -> Option<usize> {
    DTYPES.iter().find(|(name, _)| *name == dtype).map(|&(_, size)| size)
}

fn put(text: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| text.extend_from_slice(&number.to_le_bytes()));
}

fn put_text(text: &mut Vec<u8>, said: &str) {
    put(text, &[said.len() as u64]);
    text.extend_from_slice(said.as_bytes());
}

fn put_call(text: &mut Vec<u8>, call: &Call) {
    let (kind, root) = match call.collective {
        Collective::AllReduce => (0, 0),
        Collective::AllGather => (1, 0),
        Collective::Broadcast { root } => (2, root as u64),
        Collective::Barrier => (3, 0),
        Collective::Split => (4, 0),
    };
    // Calls are made with the types of the table only.
    let dtype = DTYPES.iter().position(|(name, _)| *name == call.dtype).unwrap_or(DTYPES.len());
    let (known, elements) = call.elements.map_or((0, 0), |elements| (1, elements as u64));
    put(text, &[kind, root, call.number, dtype as u64, known, elements]);
    put_text(text, &call.name);
}

fn put_error(text: &mut Vec<u8>, error: &Error) {
    match error {
        Error::Mismatch { rank, call, other, other_call } => {
            put(text, &[0, *rank as u64, *other as u64]);
            put_call(text, call);
            put_call(text, other_call);
        }
        Error::Timeout { rank, call, waited, missing } => {
            let (seconds, nanoseconds) = (waited.as_secs(), u64::from(waited.subsec_nanos()));
            put(text, &[1, *rank as u64, seconds, nanoseconds, missing.len() as u64]);
            missing.iter().for_each(|&rank| put(text, &[rank as u64]));
            put_call(text, call);
        }
        Error::Left { rank, call, left } => {
            put(text, &[2, *rank as u64, *left as u64]);
            put_call(text, call);
        }
        Error::Panicked { rank, message } => {
            put(text, &[3, *rank as u64]);
            put_text(text, message);
        }
        Error::Memory { rank, name, bytes } => {
            put(text, &[6, *rank as u64, *bytes as u64]);
            put_text(text, name);
        }
        Error::Setting { name, value, other, other_value } => {
            put(text, &[7, *other as u64]);
            [name, value, other_value].into_iter().for_each(|said| put_text(text, said));
        }
        Error::Invalid(said) => {
            put(text, &[4]);
            put_text(text, said);
        }
        Error::Transport(said) => {
            put(text, &[5]);
            put_text(text, said);
        }
    }
}

/// What has not been read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        self.take(size_of::<u64>())?.try_into().ok().map(u64::from_le_bytes)
    }

    fn index(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    fn text(&mut self) -> Option<String> {
        let len = self.index()?;
        String::from_utf8(self.take(len)?.to_vec()).ok()
    }

    fn call(&mut self) -> Option<Call> {
        let (kind, root) = (self.number()?, self.index()?);
        let collective = match kind {
            0 => Collective::AllReduce,
            1 => Collective::AllGather,
            2 => Collective::Broadcast { root },
            3 => Collective::Barrier,
            4 => Collective::Split,
            _ => return None,
        };
        let (number, (dtype, _)) = (self.number()?, *DTYPES.get(self.index()?)?);
        let (known, elements) = (self.number()?, self.index()?);
        let elements = (known == 1).then_some(elements);
        Some(Call { collective, name: self.text()?, number, dtype, elements })
    }

    fn error(&mut self) -> Option<Error> {
        Some(match self.number()? {
            0 => {
                let (rank, other) = (self.index()?, self.index()?);
                let (call, other_call) = (self.call()?.into(), self.call()?.into());
                Error::Mismatch { rank, call, other, other_call }
            }
            1 => {
                let (rank, seconds) = (self.index()?, self.number()?);
                let nanoseconds = u32::try_from(self.number()?).ok().filter(|&part| part < 1_000_000_000)?;
                let waited = Duration::new(seconds, nanoseconds);
                let missing = (0..self.number()?).map(|_| self.index()).collect::<Option<_>>()?;
                Error::Timeout { rank, call: self.call()?.into(), waited, missing }
            }
            2 => {
                let (rank, left) = (self.index()?, self.index()?);
                Error::Left { rank, call: self.call()?.into(), left }
            }
            3 => Error::Panicked { rank: self.index()?, message: self.text()? },
            4 => Error::Invalid(self.text()?),
            5 => Error::Transport(self.text()?),
            6 => {
                let (rank, bytes) = (self.index()?, self.index()?);
                Error::Memory { rank, name: self.text()?, bytes }
            }
            7 => {
                let other = self.index()?;
                let (name, value) = (self.text()?, self.text()?);
                Error::Setting { name, value, other, other_value: self.text()? }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(collective: Collective, elements: Option<usize>) -> Call {
        Call { collective, name: "layer1.\u{3b2}".into(), number: u64::MAX - 1, dtype: "f32", elements }
    }

    fn frames() -> Vec<(Message, Frame)> {
        let root = Collective::Broadcast { root: 3 };
        let kinds =
            [Collective::AllReduce, Collective::AllGather, root, Collective::Barrier, Collective::Split];
        let mut frames =
            vec![(left(7), Frame::Left(7)), (goodbye(true), Frame::Goodbye(true)), (alive(), Frame::Alive)];
        frames.push((goodbye(false), Frame::Goodbye(false)));
        for (kind, elements) in
            kinds.into_iter().zip([None, Some(5000), Some(usize::MAX), None, Some(usize::MAX / 4)])
        {
            for len in [0, 1, 7, INLINE / 4, INLINE / 4 + 1] {
                let call = call(kind, elements);
                let (frame, follow) = came(&call, &Message::new(&vec![0.5f32; len]).unwrap());
                let all = frame.bytes().len();
                let numbers = match follow {
                    true => Numbers::Follow(4 * len),
                    false => Numbers::Inline(all - 4 * len..all),
                };
                assert_eq!(follow, len > INLINE / 4);
                frames.push((frame, Frame::Came(call, numbers)));
            }
        }
        let [call, other_call] = [Some(2), None].map(|elements| Box::new(call(root, elements)));
        for error in [
            Error::Mismatch { rank: 1, call: call.clone(), other: 2, other_call },
            Error::Timeout { rank: 0, call: call.clone(), waited: Duration::new(5, 7), missing: vec![1, 9] },
            Error::Left { rank: 2, call, left: 0 },
            Error::Panicked { rank: 5, message: "no disk".into() },
            Error::Invalid(String::new()),
            Error::Transport("gone".into()),
            Error::Memory { rank: 1, name: "layer1".into(), bytes: 1 << 40 },
            Error::Setting { name: "--steps".into(), value: "3".into(), other: 1, other_value: "5".into() },
        ] {
            frames.push((failed(3, &error), Frame::Failed(3, error)));
        }
        frames
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        for (written, frame) in frames() {
            assert_eq!(parse(written.bytes()).as_ref(), Some(&frame));
        }
    }

    #[test]
    fn a_claim_of_more_numbers_than_the_call_is_of_is_refused() {
        let call = call(Collective::AllReduce, Some(1000));
        let (frame, _) = came(&call, &Message::new(&[0.5f32; 1000]).unwrap());
        let mut bytes = frame.bytes().to_vec();
        assert_eq!(parse(&bytes), Some(Frame::Came(call, Numbers::Follow(4000))));
        for claimed in [4004u64, 1 << 40, u64::MAX - 3] {
            bytes[24..32].copy_from_slice(&claimed.to_le_bytes());
            assert_eq!(parse(&bytes), None, "{claimed}");
        }
    }

    #[test]
    fn what_is_no_frame_is_refused_without_a_panic() {
        for (written, frame) in frames() {
            let bytes = written.bytes();
            // Cut anywhere but in the padding before numbers that follow.
            for len in 0..bytes.len() {
                let cut = parse(&bytes[..len]);
                assert!(
                    cut.is_none() || (bytes.len() - len < 8 && cut.as_ref() == Some(&frame)),
                    "{frame:?}"
                );
            }
            for at in 0..bytes.len().min(400) {
                let mut bytes = bytes.to_vec();
                bytes[at] ^= 0x81;
                let changed = parse(&bytes);
                assert!(at >= 8 || changed.is_none(), "another version is refused");
            }
        }
    }
}
