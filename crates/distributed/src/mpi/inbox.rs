//! What one rank receives from one other: frames, and numbers that follow them in pieces.

use std::collections::VecDeque;
use std::time::Instant;

use convoke_memory::OutOfMemory;

use super::binding::{Arrival, Receiving};
use super::wire::{self, Frame, Numbers};
use crate::message::Message;
use crate::{Call, Error};

/// Numbers that follow their frame come in messages of at most this many bytes, so that MPI's counts of 32 bits are large enough,
/// and the rank that waits sees progress.
pub(super) const PIECE: usize = 1 << 20;

/// What has come from another rank.
#[derive(Default)]
pub(super) struct Inbox {
    calls: Stream,
    notices: Stream,
    /// What it brought to calls, the current one first.
    came: VecDeque<(Call, Message)>,
    /// After how many calls it has ended.
    left: Option<u64>,
    /// In which call it has failed, and why.
    failed: Option<(u64, Error)>,
    /// When it last sent a sign that it is at work.
    alive: Option<Instant>,
    /// Something came that is no frame.
    garbled: bool,
    /// Something came that there is no memory for.
    refused: Option<OutOfMemory>,
}

/// Messages of one sender and tag, in the order in which they were sent.
#[derive(Default)]
struct Stream {
    waiting: VecDeque<Arrival>,
    receiving: Option<Receiving>,
    /// The call whose numbers come next, and their bytes.
    expected: Option<(Call, usize)>,
}

impl Inbox {
    /// Takes a message, of the calls or of the notices.
    pub(super) fn take_in(&mut self, arrival: Arrival, is_notice: bool) {
        let stream = if is_notice { &mut self.notices } else { &mut self.calls };
        stream.waiting.push_back(arrival);
    }

    /// Receives what has come, and returns whether anything changed.
    pub(super) fn advance(&mut self) -> bool {
        let mut changed = false;
        for is_notice in [false, true] {
            while !self.garbled && self.refused.is_none() {
                let stream = if is_notice { &mut self.notices } else { &mut self.calls };
                match stream.step() {
                    Step::Nothing => break,
                    Step::Went => {}
                    Step::Garbled => self.garbled = true,
                    Step::Refused(error) => self.refused = Some(error),
                    Step::Complete(message) => self.sort(message, is_notice),
                }
                changed = true;
            }
        }
        changed
    }

    fn sort(&mut self, message: Message, is_notice: bool) {
        let stream = if is_notice { &mut self.notices } else { &mut self.calls };
        if let Some((call, _)) = stream.expected.take() {
            return self.came.push_back((call, message));
        }
        match wire::parse(message.bytes()) {
            Some(Frame::Came(call, Numbers::Inline(range))) => {
                self.came.push_back((call, message.part::<u8>(range)));
            }
            Some(Frame::Came(call, Numbers::Follow(bytes))) => stream.expected = Some((call, bytes)),
            Some(Frame::Alive) => self.alive = Some(Instant::now()),
            Some(Frame::Left(calls)) => self.left = Some(calls),
            Some(Frame::Failed(number, error)) => self.failed = Some((number, error)),
            Some(Frame::Goodbye(_)) | None => self.garbled = true,
        }
    }

    /// The first call that the rank has come to and whose message has not been taken.
    pub(super) fn call(&self) -> Option<&Call> {
        let expected = || self.calls.expected.as_ref().map(|(call, _)| call);
        self.came.front().map(|(call, _)| call).or_else(expected)
    }

    /// Whether everything that the rank brought to that call is here.
    pub(super) fn is_complete(&self) -> bool {
        !self.came.is_empty()
    }

    /// What the rank brought.
    pub(super) fn pop(&mut self) -> Option<Message> {
        self.came.pop_front().map(|(_, message)| message)
    }

    /// Whether the rank has ended, and will not come to call `number`.
    pub(super) fn left_before(&self, number: u64) -> bool {
        self.call().is_none() && self.left.is_some_and(|calls| calls < number)
    }

    /// Whether the rank has ended.
    pub(super) fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// Why the rank has failed.
    pub(super) fn failed(&self) -> Option<&Error> {
        self.failed.as_ref().map(|(_, error)| error)
    }

    /// Why the rank has failed, if it has by call `number`.
    pub(super) fn failed_by(&self, number: u64) -> Option<&Error> {
        self.failed.as_ref().filter(|&&(failed, _)| failed <= number).map(|(_, error)| error)
    }

    /// When the rank last sent a sign that it is at work.
    pub(super) fn alive(&self) -> Option<Instant> {
        self.alive
    }

    /// The memory that was missing for something that came, if any was.
    pub(super) fn refused(&self) -> Option<OutOfMemory> {
        self.refused
    }

    /// Whether the rank has sent something that this version cannot read.
    pub(super) fn is_garbled(&self) -> bool {
        self.garbled
    }
}

enum Step {
    Nothing,
    Went,
    Complete(Message),
    Garbled,
    Refused(OutOfMemory),
}

impl Stream {
    fn step(&mut self) -> Step {
        let Some(receiving) = &mut self.receiving else {
            let Some(arrival) = self.waiting.pop_front() else { return Step::Nothing };
            // Nothing is allocated for numbers before their first piece is here.
            let bytes = match self.expected {
                Some((_, bytes)) if arrival.bytes == bytes.min(PIECE) => bytes,
                None if arrival.bytes <= wire::LONGEST_FRAME => arrival.bytes,
                _ => return Step::Garbled,
            };
            return match Receiving::start(bytes, arrival) {
                Ok(receiving) => {
                    self.receiving = Some(receiving);
                    Step::Went
                }
                Err(error) => Step::Refused(error),
            };
        };
        if !receiving.idle() {
            return Step::Nothing;
        }
        if let Some(message) = receiving.message() {
            self.receiving = None;
            return Step::Complete(message);
        }
        let Some(arrival) = self.waiting.pop_front() else { return Step::Nothing };
        if arrival.bytes != receiving.missing().min(PIECE) {
            return Step::Garbled;
        }
        receiving.go_on(arrival);
        Step::Went
    }
}
